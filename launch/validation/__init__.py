"""Proof that N ranks hold and compute what one would.

Reading order: `whole` (the truth from the files), `live`, `live_lora` and `live_ends` (what a
rank computes with), `inventory`, `inventory_lora` and `inventory_ends` (which is which), `compare`
and `tensors`; `loading`, `forward`, `outputs` and `oracle` (what comes out); `self_test`; `report`
and `run`.
"""
