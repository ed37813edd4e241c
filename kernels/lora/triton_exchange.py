# mypy: ignore-errors
"""How programs of one launch hand h on: words that say which launch they are of.

A word has 64 bits, a float32 below and the number of the launch above: one with this launch's
number is there, whatever other launches left. The number is drawn from a counter, to which the
programs of a launch add LAUNCH together, so that neither needs a reset. In the exchange a row's
words stand together: [site, row, part of the sum over K, rank].
"""

import triton
import triton.language as tl

from kernels.lora.triton_lanes import LANES_FIRST, RANKS, ROWS

LAUNCH = 1 << 20
"""What a launch adds to the counter: more than it has programs."""
_LAUNCH = tl.constexpr(LAUNCH)


@triton.jit
def draw(p_counter):
    """Return this launch's number, the same for all programs, and never 0."""
    others = tl.num_programs(0) - 1
    share = tl.where(tl.program_id(0) == 0, _LAUNCH - others, 1).to(tl.int64)
    return (tl.atomic_add(p_counter, share, sem="relaxed") // _LAUNCH * 2 + 1).to(tl.int32)


@triton.jit
def _either(a, b):
    return a | b


@triton.jit
def _wait_for(p_words, mask, launch):
    """Return float32 what the words hold, 0 where masked, once all are of this launch."""
    nothing = launch.to(tl.int64) << 32
    word = tl.load(p_words, mask=mask, other=nothing, volatile=True)
    while tl.reduce((word >> 32).to(tl.int32) ^ launch, None, _either) != 0:
        word = tl.load(p_words, mask=mask, other=nothing, volatile=True)
    b_h = word.to(tl.int32).to(tl.float32, bitcast=True)
    if LANES_FIRST:
        b_h = tl.permute(b_h, (1, 0, 2))
    return b_h


@triton.jit
def _words(n: tl.constexpr):
    """Return 0 .. n - 1 and 0 .. 7 of rank 3: the turns of reading a line's words, and the line."""
    other, line = tl.arange(0, n), tl.arange(0, 8)
    if LANES_FIRST:
        return other[None, :, None], line[:, None, None]
    else:
        return other[:, None, None], line[None, :, None]


@triton.jit
def await_rows(
    p_exchange,
    first,
    stop,
    r,
    rank,
    room,
    launch,
    PARTS: tl.constexpr,
    ONE_ROW: tl.constexpr,
):
    """Return float32 h [16 ranks, rows], its parts added in a fixed order, 0 beyond r and stop.

    With ONE_ROW the lanes of eight rows read parts of the first row, which all rows then have.
    """
    j = rank + tl.arange(0, 8)[None, None, :]
    if ONE_ROW:
        GROUPS: tl.constexpr = triton.next_power_of_2(triton.cdiv(PARTS, 8))
        other, line = _words(GROUPS * 2)
        part = other // 2 * 8 + line
        p_words = p_exchange + first.to(tl.int64) * (PARTS * room) + part * room + other % 2 * 8
        b_h = _wait_for(p_words + j, part < tl.where(first < stop, PARTS, 0), launch)
        b_h = tl.sum(tl.sum(tl.reshape(b_h, (GROUPS, 2, 8, 8)), 0), 1)
        b_h = tl.broadcast_to(tl.reshape(b_h, (RANKS, 1)), (RANKS, ROWS))
    else:
        POWER: tl.constexpr = triton.next_power_of_2(min(PARTS, 8))
        other, line = _words(POWER * 2)
        t = first + line
        p_words = p_exchange + t.to(tl.int64) * (PARTS * room) + other % 2 * 8 + j
        b_h = tl.zeros((RANKS, ROWS), dtype=tl.float32)
        for group in range(0, PARTS, POWER):
            part = group + other // 2
            b_part = _wait_for(p_words + part * room, (part < PARTS) & (t < stop), launch)
            b_part = tl.sum(tl.reshape(b_part, (POWER, 2, ROWS, 8)), 0)
            b_h += tl.reshape(tl.permute(b_part, (0, 2, 1)), (RANKS, ROWS))
    return tl.where((rank + tl.arange(0, RANKS) < r)[:, None], b_h, 0.0)
