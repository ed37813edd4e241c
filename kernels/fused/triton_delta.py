# mypy: ignore-errors
"""Reading a projection whose adapters' delta stands beside it."""

import triton
import triton.language as tl


@triton.jit
def load_sum(p_x, p_delta, mask, HAS_DELTA: tl.constexpr):
    """Return x, or x + delta added in float32 and rounded to x's dtype; 0 where masked."""
    b_x = tl.load(p_x, mask=mask, other=0.0)
    if HAS_DELTA:
        b_delta = tl.load(p_delta, mask=mask, other=0.0)
        b_x = (b_x.to(tl.float32) + b_delta.to(tl.float32)).to(b_x.dtype)
    return b_x
