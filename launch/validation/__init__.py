"""Proof that N ranks hold and compute what one would.

Reading order: `whole` (the truth from the files), `live` and `live_lora` (what a rank computes
with), `inventory` and `inventory_lora` (which is which), `compare` and `tensors`; `loading`,
`forward`, `outputs` and `oracle` (what comes out); `self_test`; `report` and `run`.
"""
