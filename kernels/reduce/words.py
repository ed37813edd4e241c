# mypy: ignore-errors
"""Triton: 32-bit words as values, and words in other ranks' memory.

Legend: words are one float32 or two neighbouring 16-bit values.
"""

import triton
import triton.language as tl


@triton.jit
def low(words, DTYPE: tl.constexpr):
    """The value at the lower address, in float32."""
    if DTYPE.primitive_bitwidth == 32:
        return words.to(tl.float32, bitcast=True)
    else:
        return (words & 0xFFFF).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def high(words, DTYPE: tl.constexpr):
    """The value at the higher address, in float32; 0 for float32 words, which have none."""
    if DTYPE.primitive_bitwidth == 32:
        return tl.zeros_like(words).to(tl.float32)
    else:
        return (words >> 16).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def joined(b_low, b_high, DTYPE: tl.constexpr):
    """Round and put together what `low` and `high` take apart."""
    if DTYPE.primitive_bitwidth == 32:
        return b_low.to(tl.int32, bitcast=True)
    else:
        b_first = b_low.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        b_second = b_high.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32)
        return b_first | (b_second << 16)


@triton.jit
def send_stamped(b_mine, p_peers, o_box, o_piece, mask, use, RANK, WORLD: tl.constexpr, BLOCK):
    """Leave this rank's piece in every peer's mailbox, each word beside the number of the use."""
    b_stamped = (use.to(tl.int64) << 32) | (b_mine.to(tl.int64) & 0xFFFFFFFF)
    for step in tl.static_range(1, WORLD):
        p_peer = p_peers[(RANK + step) % WORLD]
        tl.store(p_peer + o_box + RANK * BLOCK + o_piece, b_stamped, mask=mask)


@triton.jit
def receive_stamped(p_from, mask, use):
    """Wait until all words of a piece are of this use."""
    b_got = tl.load(p_from, mask=mask, other=0, volatile=True)
    while tl.max((mask & ((b_got >> 32).to(tl.int32) != use)).to(tl.int32), 0) != 0:
        b_got = tl.load(p_from, mask=mask, other=0, volatile=True)
    return b_got.to(tl.int32)


@triton.jit
def send_signalled(
    b_mine, p_peers, p_signals, box, o_piece, mask, use, RANK, WORLD: tl.constexpr, BLOCK
):
    """Leave this rank's piece in every peer's mailbox, then say so."""
    for step in tl.static_range(1, WORLD):
        p_peer = p_peers[(RANK + step) % WORLD]
        tl.store(p_peer + (box * WORLD + RANK) * BLOCK + o_piece, b_mine, mask=mask)
    tl.debug_barrier()  # all threads' words, before one thread's signal
    for step in tl.static_range(1, WORLD):
        p_signal = p_signals[(RANK + step) % WORLD] + box * WORLD + RANK
        tl.atomic_xchg(p_signal, use, sem="release", scope="sys")


@triton.jit
def wait_for_signals(p_signals, box, use, RANK, WORLD: tl.constexpr):
    """Wait until the pieces of all the others are there."""
    for sender in tl.static_range(WORLD):
        if sender != RANK:
            p_signal = p_signals[RANK] + box * WORLD + sender
            while tl.atomic_add(p_signal, 0, sem="acquire", scope="sys") != use:
                pass
    tl.debug_barrier()


__all__ = [
    "high",
    "joined",
    "low",
    "receive_stamped",
    "send_signalled",
    "send_stamped",
    "wait_for_signals",
]
