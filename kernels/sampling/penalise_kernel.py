# mypy: ignore-errors
"""Triton: penalties in one pass over the rows that have them."""

import triton
import triton.language as tl


@triton.jit
def penalise_kernel(
    p_logits,  # float32 [R, columns], rows stride_row apart
    p_seen,  # uint8 [S, columns], contiguous
    p_counts,  # int32 [S, columns], contiguous
    p_rows,  # int64 [n]
    p_slots,  # int64 [n]
    p_factors,  # float32 [3, n], contiguous
    columns,
    stride_row,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(1)
    count = tl.num_programs(1)
    o_c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = o_c < columns
    o_slot = tl.load(p_slots + i) * columns + o_c
    p_x = p_logits + tl.load(p_rows + i) * stride_row + o_c
    b_x = tl.load(p_x, mask=mask, other=0.0)
    b_count = tl.load(p_counts + o_slot, mask=mask, other=0)
    b_seen = tl.load(p_seen + o_slot, mask=mask, other=0)
    repetition = tl.load(p_factors + i)
    presence = tl.load(p_factors + count + i)
    frequency = tl.load(p_factors + 2 * count + i)
    b_factor = tl.zeros((BLOCK,), tl.float32) + repetition
    b_repeated = tl.where(b_x > 0, tl.div_rn(b_x, b_factor), b_x * repetition)
    b_x = tl.where((b_seen != 0) | (b_count > 0), b_repeated, b_x)
    b_x -= tl.where(b_count > 0, presence, 0.0)
    b_x -= frequency * b_count.to(tl.float32)
    tl.store(p_x, b_x, mask=mask)


__all__ = ["penalise_kernel"]
