# mypy: ignore-errors
"""Triton: the draw of a token from each row.

Two launches: many programs a row sum the weights, all and above eight bounds; then one program a
row finds the token.
"""

import triton
import triton.language as tl

from kernels.sampling import MASS_BITS, MAX_RATE
from kernels.sampling.select_kernel import (
    bits_of,
    bounds,
    narrow,
    nth_equal,
    nth_listed,
    search,
    sums_above,
    value_of,
    weights,
    whole,
)

_MAX_RATE = tl.constexpr(MAX_RATE)
_REACH = tl.constexpr((MASS_BITS + 1) * 0.6931471805599453 + 1e-2)
"""Tokens whose logit is this many temperatures below the best have no weight."""
_LOWEST = tl.constexpr(-(2.0**127))


@triton.jit
def _rate(p_temperature):
    temperature = tl.load(p_temperature)
    temperature = tl.where(temperature == 0, 1.0, temperature)
    return temperature, 1.0 / tl.maximum(temperature, 1.0 / _MAX_RATE)


@triton.jit
def _able(best):
    return (best < float("inf")) & (best > float("-inf"))


@triton.jit
def _first_bounds(best, temperature, SHIFT: tl.constexpr):
    """Eight bounds from below all tokens that have a weight."""
    least = tl.maximum(best.to(tl.float64) - temperature * _REACH, _LOWEST)
    # Two steps below, as the bound is rounded.
    lo = bits_of(least.to(tl.float32), SHIFT).to(tl.int64) - 2
    return bounds(lo, bits_of(best, SHIFT).to(tl.int64), True, SHIFT)


@triton.jit
def weigh_kernel(
    p_logits,  # [R, columns], rows stride_row apart
    p_rows,  # int64 [n]
    p_top,  # float32 [n]
    p_temperature,  # float64 [n]
    p_top_k,  # int64 [n]
    p_top_p,  # float64 [n]
    p_min_p,  # float64 [n]
    p_sums,  # int64 [n, parts, 17]: masses and counts above the bounds, mass of min_p or more
    columns,
    stride_row,
    part,  # columns of a program
    SHIFT: tl.constexpr,
    LANES: tl.constexpr,
):
    i = tl.program_id(1).to(tl.int64)
    best = tl.load(p_top + i)
    if _able(best):
        p_row = p_logits + tl.load(p_rows + i) * stride_row
        temperature, rate = _rate(p_temperature + i)
        top = best.to(tl.float64)
        min_p = tl.load(p_min_p + i)
        by_rank = (tl.load(p_top_k + i) > 0) | (tl.load(p_top_p + i) < 1)
        start = tl.program_id(0) * part
        stop = tl.minimum(start + part, columns)
        p_out = p_sums + (i * tl.num_programs(0) + tl.program_id(0)) * 17
        if by_rank:
            b_mass, b_count = sums_above(
                p_row, start, stop, _first_bounds(best, temperature, SHIFT), top, rate,
                SHIFT, LANES, True,
            )  # fmt: skip
            tl.store(p_out + tl.arange(0, 8), b_mass)
            tl.store(p_out + 8 + tl.arange(0, 8), b_count)
        if (min_p > 0) | (by_rank == 0):
            b_sum = tl.zeros((LANES * 8,), tl.int64)
            for first in range(start, stop, LANES * 8):
                b_sum += _filtered(p_row, first, stop, top, rate, min_p, LANES * 8)
            tl.store(p_out + 16, tl.sum(b_sum, 0))


@triton.jit
def _filtered(p_row, start, stop, top, rate, min_p, TILE: tl.constexpr):
    """Whole weights of a tile, 0 of those below ``min_p``."""
    o_c = start + tl.arange(0, TILE)
    b_x = tl.load(p_row + o_c, mask=o_c < stop, other=float("-inf")).to(tl.float32)
    b_weight = weights(b_x, top, rate)
    return tl.where((b_weight >= min_p) & (o_c < stop), whole(b_weight), 0)


@triton.jit
def draw_kernel(
    p_logits,  # [R, columns], rows stride_row apart
    p_rows,  # int64 [n]
    p_top,  # float32 [n]
    p_temperature,  # float64 [n]
    p_top_k,  # int64 [n]
    p_top_p,  # float64 [n]
    p_min_p,  # float64 [n]
    p_uniform,  # float64 [n]
    p_sums,  # int64 [n, parts, 17]
    p_list,  # int64 [n, LIST]
    p_out,  # int64 [n]
    columns,
    stride_row,
    part,
    parts,
    SHIFT: tl.constexpr,
    LANES: tl.constexpr,
    LIST: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    best = tl.load(p_top + i)
    column = tl.zeros((), tl.int32)
    if _able(best):
        p_row = p_logits + tl.load(p_rows + i) * stride_row
        p_sums += i * parts * 17
        temperature, rate = _rate(p_temperature + i)
        top_k, top_p = tl.load(p_top_k + i), tl.load(p_top_p + i)
        min_p, uniform = tl.load(p_min_p + i), tl.load(p_uniform + i)
        if (top_k > 0) | (top_p < 1):
            column = _by_rank(
                p_row, p_sums, p_list + i * LIST, columns, parts, best, temperature, rate,
                top_k, top_p, min_p, uniform, SHIFT, LANES, LIST, TILE, BLOCK_PARTS,
            )  # fmt: skip
        else:
            column = _by_column(
                p_row, p_sums, columns, part, parts, best.to(tl.float64), rate, min_p, uniform,
                LANES * 8, BLOCK_PARTS,
            )  # fmt: skip
    tl.store(p_out + i, column.to(tl.int64))


@triton.jit
def _by_rank(
    p_row, p_sums, p_list, columns, parts, best, temperature, rate,
    top_k, top_p, min_p, uniform,
    SHIFT: tl.constexpr, LANES: tl.constexpr, LIST: tl.constexpr, TILE: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
):  # fmt: skip
    """What is kept is always the best tokens up to some one: its sum tells which."""
    top = best.to(tl.float64)
    most = bits_of(best, SHIFT).to(tl.int64)
    b_bounds = _first_bounds(best, temperature, SHIFT)
    o_p = tl.arange(0, BLOCK_PARTS)[:, None]
    p_words = p_sums + o_p * 17 + tl.arange(0, 8)[None, :]
    b_mass = tl.sum(tl.load(p_words, mask=o_p < parts, other=0), 0)
    b_count = tl.sum(tl.load(p_words + 8, mask=o_p < parts, other=0), 0)
    kept, count = tl.max(b_mass, 0), tl.max(b_count, 0)  # of the lowest bound
    # Three searches at most: the last of the first k, the last of the top p, the drawn one.
    by_k, by_p = (top_k > 0) & (top_k < count), top_p < 1
    zero = tl.zeros((), tl.int64)
    listed_lo, listed_hi, size = most, most, tl.zeros((), tl.int32)
    bound, mass, above, target = zero, zero, zero, zero
    for stage in range(3):
        wanted = (stage == 2) | ((stage == 0) & by_k) | ((stage == 1) & by_p)
        if stage == 0:
            target = top_k - 1
        if stage == 1:
            target = tl.ceil(top_p * kept.to(tl.float64)).to(tl.int64) - 1
            target = tl.minimum(tl.maximum(target, 0), kept - 1)
        if stage == 2:
            if min_p > 0:
                o_f = tl.arange(0, BLOCK_PARTS)
                b_part = tl.load(p_sums + o_f * 17 + 16, mask=o_f < parts, other=0)
                kept = tl.minimum(kept, tl.sum(b_part, 0))
            target = (uniform * kept.to(tl.float64)).to(tl.int64)
        if wanted:
            lo, lo_count, hi, hi_mass, hi_count = narrow(
                b_bounds, b_mass, b_count, most, zero, zero, target, stage == 0
            )
            bound, mass, above, listed_lo, listed_hi, size = search(
                p_row, p_list, columns, lo, lo_count, hi, hi_mass, hi_count,
                listed_lo, listed_hi, size, most, top, rate, target, stage == 0,
                SHIFT, LANES, LIST, TILE, True,
            )  # fmt: skip
            one = whole(weights(value_of(bound, SHIFT), top, rate))
            if stage == 0:
                kept = mass + (top_k - above) * one
            if stage == 1:
                kept = mass + ((target - mass) // one + 1) * one
    number = (target - mass) // whole(weights(value_of(bound, SHIFT), top, rate))
    if (bound > listed_lo) & (bound <= listed_hi):
        column = nth_listed(p_list, size, bound, number, LIST)
    else:
        column = nth_equal(p_row, columns, bound, number, SHIFT, TILE)
    return column


@triton.jit
def _by_column(
    p_row, p_sums, columns, part, parts, top, rate, min_p, uniform,
    TILE: tl.constexpr, BLOCK_PARTS: tl.constexpr,
):  # fmt: skip
    o_p = tl.arange(0, BLOCK_PARTS)
    b_sums = tl.load(p_sums + o_p * 17 + 16, mask=o_p < parts, other=0)
    target = (uniform * tl.sum(b_sums, 0).to(tl.float64)).to(tl.int64)
    here = tl.sum((tl.cumsum(b_sums, 0) <= target).to(tl.int32), 0)
    before = tl.sum(tl.where(o_p < here, b_sums, 0), 0)
    column = tl.zeros((), tl.int32)
    stop = tl.minimum((here + 1) * part, columns)
    for start in range(here * part, stop, TILE):
        b_mass = _filtered(p_row, start, stop, top, rate, min_p, TILE)
        total = tl.sum(b_mass, 0)
        if (before <= target) & (target < before + total):
            m_before = before + tl.cumsum(b_mass, 0) <= target
            column = start + tl.sum(m_before.to(tl.int32), 0)
        before += total
    return column


__all__ = ["draw_kernel", "weigh_kernel"]
