# mypy: ignore-errors
"""Triton: which logit of a row the running sum of weights crosses a target at, without a sort.

Logits are searched by their bits in the order of their values: ordered bits, an integer without the
low bits that the dtype never sets (SHIFT). The sum of all weights above a bound falls as the bound
rises, so the sought logit is the smallest bound above which the sum is at most the target:

      sum above   > target     <= target
    bound  ---- lo | ........ | hi ----------> top
                     sought

Sums above eight bounds leave an eighth of the interval; as soon as few enough logits are left in it
they are listed, and the list is bisected in registers.
"""

import triton
import triton.language as tl

from kernels.sampling import MASS_BITS
from kernels.sampling.best_kernel import ordered

_SCALE = tl.constexpr(2.0**MASS_BITS)
_UNIT = tl.constexpr(2.0**52)
_FRACTION = tl.constexpr(2**52 - 1)
_ONE = tl.constexpr(1 << 50)
"""One logit, in a word of sums: weights fill the lower 50 bits, the number of logits the rest."""
_STAGES = tl.constexpr(3)
"""Tiles whose loads are in flight."""
_LEAST = tl.constexpr(-2139095040)
"""Ordered bits of the smallest finite float32."""
_LINEAR = tl.constexpr(4)
"""Passes that cut the interval of values in eight; then its bits are cut, which always ends."""
MAX_SUM = 1 << 11
"""Logits that a word may be the sum of, those of a lane or of a list: they weigh 2**49 at most."""


@triton.jit
def bits_of(b_x, SHIFT: tl.constexpr):
    """Ordered bits, int32, of logits of a dtype whose float32 has SHIFT low bits of 0."""
    return ordered(b_x) >> SHIFT


@triton.jit
def value_of(b_bits, SHIFT: tl.constexpr):
    """The float32 of ordered bits (int64)."""
    b_full = (b_bits << SHIFT) | tl.where(b_bits < 0, (1 << SHIFT) - 1, 0)
    b_full = tl.where(b_full < 0, b_full ^ 0x7FFFFFFF, b_full).to(tl.int32)
    return b_full.to(tl.float32, bitcast=True)


@triton.jit
def weights(b_x, top, rate):
    """float64 exp((x - top) * rate)."""
    return tl.exp((b_x.to(tl.float64) - top) * rate)


@triton.jit
def whole(b_weight):
    """int64 of a weight: rounded to even where 2**52 has no bits left for the rest."""
    return (b_weight * _SCALE + _UNIT).to(tl.int64, bitcast=True) & _FRACTION


@triton.jit
def item(b_x, index):
    """One element of a vector of eight."""
    return tl.sum(tl.where(tl.arange(0, 8) == index, b_x, 0), 0)


@triton.jit
def put(b_x, index, value):
    """A vector of eight with one element replaced."""
    return tl.where(tl.arange(0, 8) == index, value, b_x)


@triton.jit
def bounds(lo, hi, linear, SHIFT: tl.constexpr):
    """Eight ascending bounds from ``lo`` on, below ``hi``: of equal steps in value or in bits."""
    o_k = tl.arange(0, 8)
    b_bits = lo + (((hi - lo) * o_k) >> 3)
    least = value_of(tl.maximum(lo, (_LEAST >> SHIFT) + 1), SHIFT).to(tl.float64)
    step = (value_of(hi, SHIFT).to(tl.float64) - least) / 8
    b_values = bits_of((least + step * o_k).to(tl.float32), SHIFT).to(tl.int64)
    b_values = tl.minimum(tl.maximum(b_values, lo), hi)
    return tl.where(o_k == 0, lo, tl.where(linear, b_values, b_bits))


@triton.jit
def sums_above(
    p_row, start, stop, b_bounds, top, rate,
    SHIFT: tl.constexpr, LANES: tl.constexpr, HAS_MASS: tl.constexpr,
):  # fmt: skip
    """Of columns start .. stop: sums of whole weights and numbers of logits above each of eight
    bounds, int64 [8] each."""
    o_e = tl.arange(0, LANES)[:, None] * 8 + tl.arange(0, 8)[None, :]
    t_0 = item(b_bounds, 0).to(tl.int32)
    t_1 = item(b_bounds, 1).to(tl.int32)
    t_2 = item(b_bounds, 2).to(tl.int32)
    t_3 = item(b_bounds, 3).to(tl.int32)
    t_4 = item(b_bounds, 4).to(tl.int32)
    t_5 = item(b_bounds, 5).to(tl.int32)
    t_6 = item(b_bounds, 6).to(tl.int32)
    t_7 = item(b_bounds, 7).to(tl.int32)
    b_0 = tl.zeros((LANES,), tl.int64)
    b_1 = tl.zeros((LANES,), tl.int64)
    b_2 = tl.zeros((LANES,), tl.int64)
    b_3 = tl.zeros((LANES,), tl.int64)
    b_4 = tl.zeros((LANES,), tl.int64)
    b_5 = tl.zeros((LANES,), tl.int64)
    b_6 = tl.zeros((LANES,), tl.int64)
    b_7 = tl.zeros((LANES,), tl.int64)
    for first in tl.range(start, stop, LANES * 8, num_stages=_STAGES):
        mask = first + o_e < stop
        b_x = tl.load(p_row + first + o_e, mask=mask, other=float("-inf")).to(tl.float32)
        b_key = bits_of(b_x, SHIFT)
        b_word = tl.where(mask, _ONE, 0).to(tl.int64)
        if HAS_MASS:
            b_word += tl.where(mask, whole(weights(b_x, top, rate)), 0)
        b_0 += tl.sum(tl.where(b_key > t_0, b_word, 0), 1)
        b_1 += tl.sum(tl.where(b_key > t_1, b_word, 0), 1)
        b_2 += tl.sum(tl.where(b_key > t_2, b_word, 0), 1)
        b_3 += tl.sum(tl.where(b_key > t_3, b_word, 0), 1)
        b_4 += tl.sum(tl.where(b_key > t_4, b_word, 0), 1)
        b_5 += tl.sum(tl.where(b_key > t_5, b_word, 0), 1)
        b_6 += tl.sum(tl.where(b_key > t_6, b_word, 0), 1)
        b_7 += tl.sum(tl.where(b_key > t_7, b_word, 0), 1)
    b_mass = tl.zeros((8,), tl.int64)
    b_count = tl.zeros((8,), tl.int64)
    b_mass, b_count = _total(b_mass, b_count, 0, b_0)
    b_mass, b_count = _total(b_mass, b_count, 1, b_1)
    b_mass, b_count = _total(b_mass, b_count, 2, b_2)
    b_mass, b_count = _total(b_mass, b_count, 3, b_3)
    b_mass, b_count = _total(b_mass, b_count, 4, b_4)
    b_mass, b_count = _total(b_mass, b_count, 5, b_5)
    b_mass, b_count = _total(b_mass, b_count, 6, b_6)
    b_mass, b_count = _total(b_mass, b_count, 7, b_7)
    return b_mass, b_count


@triton.jit
def _total(b_mass, b_count, index, b_word):
    b_mass = put(b_mass, index, tl.sum(b_word & (_ONE - 1), 0))
    return b_mass, put(b_count, index, tl.sum(b_word >> 50, 0))


@triton.jit
def narrow(b_bounds, b_mass, b_count, hi, hi_mass, hi_count, target, by_count):
    """The part between two neighbouring bounds: lo, logits above it, and the same of hi."""
    o_k = tl.arange(0, 8)
    m_low = tl.where(by_count, b_count, b_mass) <= target
    first = tl.min(tl.where(m_low, o_k, 8), 0)
    low = first < 8
    hi = tl.where(low, item(b_bounds, first), hi)
    hi_mass = tl.where(low, item(b_mass, first), hi_mass)
    hi_count = tl.where(low, item(b_count, first), hi_count)
    return item(b_bounds, first - 1), item(b_count, first - 1), hi, hi_mass, hi_count


@triton.jit
def list_between(
    p_row, p_list, columns, lo, hi, SHIFT: tl.constexpr, TILE: tl.constexpr, LIST: tl.constexpr
):
    """Write the first LIST logits in (lo, hi] to ``p_list``, by column: ordered bits, column.

    Returns how many there are, int32.
    """
    o_e = tl.arange(0, TILE)
    size = tl.zeros((), tl.int32)
    low, high = lo.to(tl.int32), hi.to(tl.int32)
    for start in tl.range(0, columns, TILE, num_stages=_STAGES):
        mask = start + o_e < columns
        b_x = tl.load(p_row + start + o_e, mask=mask, other=float("-inf")).to(tl.float32)
        b_key = bits_of(b_x, SHIFT)
        b_in = (mask & (b_key > low) & (b_key <= high)).to(tl.int32)
        found = tl.sum(b_in, 0)
        if (found > 0) & (size < LIST):
            o_l = size + tl.cumsum(b_in, 0) - 1
            b_word = (b_key.to(tl.int64) << 32) | (start + o_e)
            tl.store(p_list + o_l, b_word, mask=(b_in != 0) & (o_l < LIST))
        size += found
    tl.debug_barrier()  # other threads read what this one wrote
    return size


@triton.jit
def search(
    p_row, p_list, columns, lo, lo_count, hi, hi_mass, hi_count, listed_lo, listed_hi, size,
    most, top, rate, target, by_count,
    SHIFT: tl.constexpr, LANES: tl.constexpr, LIST: tl.constexpr, TILE: tl.constexpr,
    HAS_MASS: tl.constexpr,
):  # fmt: skip
    """The sought logit's ordered bits, the sum of weights and number of logits above it, and what
    is listed now: bounds and size.

    ``lo_count``: logits above ``lo``; likewise for ``hi``; ``most``: the largest logit's bits. With
    ``by_count`` every logit weighs 1; without ``HAS_MASS`` nothing else is summed.
    """
    passes = 0
    while (lo_count - hi_count > LIST) & (hi - lo > 1):
        b_bounds = bounds(lo, hi, passes < _LINEAR, SHIFT)
        b_mass, b_count = sums_above(p_row, 0, columns, b_bounds, top, rate, SHIFT, LANES, HAS_MASS)
        lo, lo_count, hi, hi_mass, hi_count = narrow(
            b_bounds, b_mass, b_count, hi, hi_mass, hi_count, target, by_count
        )
        passes += 1
    if lo_count - hi_count <= LIST:
        if (lo < listed_lo) | (hi > listed_hi):
            # All from here to the best logit, if they have room: that serves other searches too.
            listed_lo = lo
            listed_hi = tl.where(lo_count <= LIST, most, hi)
            size = list_between(p_row, p_list, columns, lo, listed_hi, SHIFT, TILE, LIST)
        o_l = tl.arange(0, LIST)
        b_key = tl.where(o_l < size, tl.load(p_list + o_l, mask=o_l < size, other=0) >> 32, most)
        m_in = (o_l < size) & (b_key > lo) & (b_key <= hi)
        b_word = tl.where(m_in, _ONE, 0).to(tl.int64)
        if HAS_MASS:
            b_word += tl.where(m_in, whole(weights(value_of(b_key, SHIFT), top, rate)), 0)
        more_mass, more_count = hi_mass, hi_count
        while hi - lo > 1:
            middle = (lo + hi) >> 1
            word = tl.sum(tl.where(b_key > middle, b_word, 0), 0)
            mass = more_mass + (word & (_ONE - 1))
            count = more_count + (word >> 50)
            low = tl.where(by_count, count, mass) <= target
            hi = tl.where(low, middle, hi)
            hi_mass = tl.where(low, mass, hi_mass)
            hi_count = tl.where(low, count, hi_count)
            lo = tl.where(low, lo, middle)
    return hi, hi_mass, hi_count, listed_lo, listed_hi, size


@triton.jit
def nth_listed(p_list, size, bound, number, LIST: tl.constexpr):
    """The column of the listed logit with the bits ``bound`` and ``number`` such ones before it."""
    o_l = tl.arange(0, LIST)
    b_word = tl.load(p_list + o_l, mask=o_l < size, other=0)
    b_same = ((o_l < size) & ((b_word >> 32) == bound)).to(tl.int32)
    m_it = (b_same != 0) & (tl.cumsum(b_same, 0) - 1 == number)
    return tl.sum(tl.where(m_it, b_word & 0xFFFFFFFF, 0), 0).to(tl.int32)


@triton.jit
def nth_equal(p_row, columns, bound, number, SHIFT: tl.constexpr, TILE: tl.constexpr):
    """The same of all logits of a row."""
    o_e = tl.arange(0, TILE)
    seen = tl.zeros((), tl.int64)
    column = tl.zeros((), tl.int32)
    wanted = bound.to(tl.int32)
    for start in tl.range(0, columns, TILE, num_stages=_STAGES):
        mask = start + o_e < columns
        b_x = tl.load(p_row + start + o_e, mask=mask, other=float("-inf")).to(tl.float32)
        b_same = (mask & (bits_of(b_x, SHIFT) == wanted)).to(tl.int32)
        found = tl.sum(b_same, 0).to(tl.int64)
        if (seen <= number) & (number < seen + found):
            m_it = (b_same != 0) & (tl.cumsum(b_same, 0) - 1 == number - seen)
            column = tl.sum(tl.where(m_it, start + o_e, 0), 0)
        seen += found
    return column


__all__ = [
    "MAX_SUM",
    "bits_of",
    "bounds",
    "list_between",
    "narrow",
    "nth_equal",
    "nth_listed",
    "search",
    "sums_above",
    "value_of",
    "weights",
    "whole",
]
