# mypy: ignore-errors
"""Triton: the best token of each row in one pass over its logits, by many programs a row.

A token's key orders by logit, then by lowest id (`kernels.sampling.keys`), so the largest key of a
row is the same however the row is cut.
"""

import triton
import triton.language as tl

from kernels.sampling.keys import PAD

BROKEN = 2**63 - 1
"""Stands for a row with NaN or plus infinity: above every key."""
_PAD = tl.constexpr(PAD)
_BROKEN = tl.constexpr(BROKEN)


@triton.jit
def ordered(b_x):
    """int32 in the order of float32 ``b_x``; equal numbers are equal, zeros included."""
    b_bits = tl.where(b_x == 0, 0.0, b_x).to(tl.int32, bitcast=True)
    return tl.where(b_bits < 0, b_bits ^ 0x7FFFFFFF, b_bits)


@triton.jit
def best_kernel(
    p_logits,  # [R, columns], rows stride_row apart
    p_partial,  # int64 [R, SPLITS]
    p_arrived,  # int32 [R], all 0 before and after a launch
    p_out,  # int64 [R, 2]: key, whether the row is broken
    p_slots,  # int64 [R]
    p_last,  # int64 [slots]
    columns,
    stride_row,
    first_id,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
):
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    o_first = part * (STEPS * BLOCK) + tl.arange(0, BLOCK)
    b_best = tl.full((BLOCK,), float("-inf"), tl.float32)
    b_at = o_first
    b_broken = tl.zeros((BLOCK,), tl.int32)
    for step in range(STEPS):
        o_c = o_first + step * BLOCK
        p_x = p_logits + row * stride_row + o_c
        b_x = tl.load(p_x, mask=o_c < columns, other=float("-inf")).to(tl.float32)
        b_broken = tl.where(b_x < float("inf"), b_broken, 1)  # no comparison holds for NaN
        m_better = b_x > b_best  # of equals the first stays
        b_best = tl.where(m_better, b_x, b_best)
        b_at = tl.where(m_better, o_c, b_at)
    b_id = first_id + b_at.to(tl.int64)
    b_key = (ordered(b_best).to(tl.int64) << 32) | (0xFFFFFFFF - b_id)
    b_key = tl.where(o_first < columns, b_key, _PAD)
    b_key = tl.where(b_broken != 0, _BROKEN, b_key)
    key = tl.max(b_key, 0)
    last = True
    if SPLITS > 1:
        tl.store(p_partial + row * SPLITS + part, key)
        tl.debug_barrier()
        last = tl.atomic_add(p_arrived + row, 1, sem="acq_rel") == SPLITS - 1
    if last:
        if SPLITS > 1:
            o_p = tl.arange(0, BLOCK_SPLITS)
            p_keys = p_partial + row * SPLITS + o_p
            b_keys = tl.load(p_keys, mask=o_p < SPLITS, other=_PAD, cache_modifier=".cg")
            key = tl.max(b_keys, 0)
            tl.store(p_arrived + row, 0)  # as the next launch expects it
        broken = key == _BROKEN
        tl.store(p_out + row * 2, tl.where(broken, _PAD, key))
        tl.store(p_out + row * 2 + 1, broken.to(tl.int64))
        if HAS_SLOTS:
            failed = broken | ((key >> 32) == (_PAD >> 32))  # the best is minus infinity
            token = tl.where(failed, 0, 0xFFFFFFFF - (key & 0xFFFFFFFF))
            tl.store(p_last + tl.load(p_slots + row), token)


__all__ = ["BROKEN", "best_kernel", "ordered"]
