"""Parts of ``launch/bench/adapters.py``: first tokens by tier, steps beside loads, many names."""
