# mypy: ignore-errors
"""Triton: one program packs the best tokens of one row, or sums its exponentials."""

import triton
import triton.language as tl

from kernels.sampling.best_kernel import ordered
from kernels.sampling.keys import PAD
from kernels.sampling.select_kernel import bits_of, list_between, search, value_of

_PAD = tl.constexpr(PAD)
_STAGES = tl.constexpr(3)
"""Tiles whose loads are in flight."""
_TINY = tl.constexpr(2.0**-1000)


@triton.jit
def top_kernel(
    p_logits,  # [R, columns], rows stride_row apart
    p_list,  # int64 [R, LIST]
    p_found,  # int64 [R, WIDTH]
    p_out,  # int64 [R, width + 1]: keys, whether the row is broken
    columns,
    stride_row,
    first_id,
    width,
    WIDTH: tl.constexpr,  # power of two, width or more, at most LANES
    SHIFT: tl.constexpr,
    LANES: tl.constexpr,
    LIST: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    p_row = p_logits + row * stride_row
    p_list += row * LIST
    p_keys = p_found + row * WIDTH
    o_w = tl.arange(0, WIDTH)
    tl.store(p_keys + o_w, tl.full((WIDTH,), _PAD, tl.int64))
    tl.debug_barrier()  # other threads write there
    b_most, broken = _lanes(p_row, columns, LANES)
    if broken == 0:
        wanted = tl.minimum(width, columns).to(tl.int64)
        most = bits_of(tl.max(b_most, 0), SHIFT).to(tl.int64)
        # WIDTH groups have a logit as large as the smallest of their largest ones.
        b_groups = tl.max(tl.reshape(b_most, (WIDTH, LANES // WIDTH)), 1)
        lo = bits_of(tl.min(b_groups, 0), SHIFT).to(tl.int64) - 1
        size = list_between(p_row, p_list, columns, lo, most, SHIFT, TILE, LIST)
        listed_lo = tl.where(size <= LIST, lo, most)
        zero = tl.zeros((), tl.int64)
        nothing = tl.zeros((), tl.float64)
        bound, _, above, listed_lo, listed_hi, size = search(
            p_row, p_list, columns, lo, size.to(tl.int64), most, zero, zero,
            listed_lo, most, size, most, nothing, nothing, wanted - 1, True,
            SHIFT, LANES, LIST, TILE, False,
        )  # fmt: skip
        equals = wanted - above
        if (listed_lo < bound) & (listed_hi == most):
            o_l = tl.arange(0, LIST)
            b_word = tl.load(p_list + o_l, mask=o_l < size, other=0)
            b_bits = b_word >> 32
            _pack(
                p_keys, first_id, zero, zero, wanted, equals, b_bits, b_word & 0xFFFFFFFF,
                (o_l < size) & (b_bits > bound), (o_l < size) & (b_bits == bound), SHIFT,
            )  # fmt: skip
        else:
            _pack_row(p_row, p_keys, columns, first_id, bound, wanted, equals, SHIFT, TILE)
        tl.debug_barrier()  # other threads read what this one wrote
    b_keys = tl.sort(tl.load(p_keys + o_w), descending=True)
    p_to = p_out + row * (width + 1)
    tl.store(p_to + o_w, b_keys, mask=o_w < width)
    tl.store(p_to + width, broken.to(tl.int64))


@triton.jit
def _lanes(p_row, columns, LANES: tl.constexpr):
    """The largest logit of each lane, float32 [LANES], and whether the row is broken."""
    o_e = tl.arange(0, LANES)[:, None] * 8 + tl.arange(0, 8)[None, :]
    b_most = tl.full((LANES, 8), float("-inf"), tl.float32)
    b_broken = tl.zeros((LANES, 8), tl.int32)
    for start in tl.range(0, columns, LANES * 8, num_stages=_STAGES):
        o_c = start + o_e
        b_x = tl.load(p_row + o_c, mask=o_c < columns, other=float("-inf")).to(tl.float32)
        b_most = tl.maximum(b_most, b_x)
        b_broken = tl.where(b_x < float("inf"), b_broken, 1)  # no comparison holds for NaN
    return tl.max(b_most, 1), tl.max(tl.max(b_broken, 1), 0)


@triton.jit
def _pack(
    p_keys, first_id, size, same, wanted, equals, b_bits, b_column, m_above, m_same,
    SHIFT: tl.constexpr,
):  # fmt: skip
    """Write the keys of logits above a bound and of the first ``equals`` that are equal to it.

    ``size`` and ``same``: keys written and equal ones met before. Returns them for the next.
    """
    b_same = m_same.to(tl.int64)
    b_take = m_above.to(tl.int64) | (b_same & (same + tl.cumsum(b_same, 0) <= equals).to(tl.int64))
    o_k = size + tl.cumsum(b_take, 0) - 1
    b_value = ordered(value_of(b_bits, SHIFT)).to(tl.int64)
    b_key = (b_value << 32) | (0xFFFFFFFF - (first_id + b_column))
    tl.store(p_keys + o_k, b_key, mask=(b_take != 0) & (o_k < wanted))
    return size + tl.sum(b_take, 0), same + tl.sum(b_same, 0)


@triton.jit
def _pack_row(
    p_row, p_keys, columns, first_id, bound, wanted, equals,
    SHIFT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """`_pack` of all logits of a row."""
    o_e = tl.arange(0, TILE)
    size = tl.zeros((), tl.int64)
    same = tl.zeros((), tl.int64)
    for start in range(0, columns, TILE):
        mask = start + o_e < columns
        b_x = tl.load(p_row + start + o_e, mask=mask, other=float("-inf")).to(tl.float32)
        b_bits = bits_of(b_x, SHIFT).to(tl.int64)
        if tl.max((mask & (b_bits >= bound)).to(tl.int32), 0) > 0:
            size, same = _pack(
                p_keys, first_id, size, same, wanted, equals, b_bits, (start + o_e).to(tl.int64),
                mask & (b_bits > bound), mask & (b_bits == bound), SHIFT,
            )  # fmt: skip


@triton.jit
def log_total_kernel(
    p_logits,  # [R, columns], rows stride_row apart
    p_rows,  # int64 [n]
    p_out,  # float64 [n]
    columns,
    stride_row,
    LANES: tl.constexpr,
):
    i = tl.program_id(0)
    p_row = p_logits + tl.load(p_rows + i) * stride_row
    b_most, _ = _lanes(p_row, columns, LANES)
    top = tl.max(b_most, 0).to(tl.float64)
    top = tl.where(top == float("-inf"), 0.0, top)  # a shard may have no possible token
    o_e = tl.arange(0, LANES)[:, None] * 8 + tl.arange(0, 8)[None, :]
    b_sum = tl.zeros((LANES,), tl.float64)
    for start in tl.range(0, columns, LANES * 8, num_stages=_STAGES):
        mask = start + o_e < columns
        b_x = tl.load(p_row + start + o_e, mask=mask, other=float("-inf")).to(tl.float64)
        b_sum += tl.sum(tl.where(mask, tl.exp(b_x - top), 0.0), 1)
    total = tl.sum(b_sum, 0)
    log = tl.where(total > 0, tl.log(tl.maximum(total, _TINY)), float("-inf"))
    tl.store(p_out + i, log + top)


__all__ = ["log_total_kernel", "top_kernel"]
