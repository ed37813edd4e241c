"""The parts of `launch/bench/kernels_attention.py`: checks, decode, prefill, small ops."""
