# mypy: ignore-errors
"""Triton: sums over ranks whose memory this GPU can write, one launch a rank, no copies.

Each program pushes a row of the rank's part into a mailbox in every peer's memory, then waits for
the peers' rows in its own. A mailbox is written anew with every second use only, and a peer that
sends row n + 2 has received row n + 1, which was sent after row n had been read: so no barrier is
needed before a mailbox is used again.

    mailboxes of a rank: [program][use & 1][sender][piece]

With NORM the sum is added to the residual and normed, rounded where the three are by themselves.
"""

import triton
import triton.language as tl

from kernels.reduce.words import (
    high,
    joined,
    low,
    receive_stamped,
    send_signalled,
    send_stamped,
    wait_for_signals,
)


@triton.jit
def _finish(
    b_low, b_high, p_residual, p_weight, p_out, p_total, o_x, o_piece, mask, words, eps,
    DTYPE: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Store the sum of a row, or what comes of it."""
    b_sum = joined(b_low, b_high, DTYPE)
    if NORM:
        b_residual = tl.load(p_residual + o_x, mask=mask, other=0)
        b_weight = tl.load(p_weight + o_piece, mask=mask, other=0)
        b_total = joined(
            low(b_sum, DTYPE) + low(b_residual, DTYPE),
            high(b_sum, DTYPE) + high(b_residual, DTYPE),
            DTYPE,
        )
        tl.store(p_total + o_x, b_total, mask=mask)
        b_low, b_high = low(b_total, DTYPE), high(b_total, DTYPE)
        values = words * (32 // DTYPE.primitive_bitwidth)
        b_factor = tl.rsqrt(tl.sum(b_low * b_low + b_high * b_high, 0) / values + eps)
        b_normed = joined(b_low * b_factor, b_high * b_factor, DTYPE)
        b_sum = joined(
            low(b_normed, DTYPE) * low(b_weight, DTYPE),
            high(b_normed, DTYPE) * high(b_weight, DTYPE),
            DTYPE,
        )
    tl.store(p_out + o_x, b_sum, mask=mask)


@triton.jit
def sum_stamped(
    p_x,  # int32 [T, words]: this rank's part
    p_residual,  # int32 [T, words]; read with NORM
    p_weight,  # int32 [words]; read with NORM
    p_out,  # int32 [T, words]: the sum, or with NORM what is normed
    p_total,  # int32 [T, words]: sum + residual; written with NORM
    p_peers,  # int64, one a rank: the ranks' mailboxes
    p_uses,  # int32 [programs]: how often each program's mailboxes have been used
    words,
    eps,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,  # words of a mailbox; at least those of a row
    NORM: tl.constexpr,
):
    """Nothing but the words is waited for: twice the bytes, but one crossing of the link."""
    row = tl.program_id(0)
    o_piece = tl.arange(0, BLOCK)
    o_x = row * words + o_piece
    mask = o_piece < words
    use = tl.load(p_uses + row) + 1
    b_mine = tl.load(p_x + o_x, mask=mask, other=0)
    o_box = (row * 2 + (use & 1)) * (WORLD * BLOCK)
    send_stamped(b_mine, p_peers, o_box, o_piece, mask, use, RANK, WORLD, BLOCK)
    b_low = tl.zeros([BLOCK], tl.float32)
    b_high = tl.zeros([BLOCK], tl.float32)
    for sender in tl.static_range(WORLD):
        b_part = b_mine
        if sender != RANK:
            p_from = p_peers[RANK] + o_box + sender * BLOCK + o_piece
            b_part = receive_stamped(p_from, mask, use)
        b_low += low(b_part, DTYPE)
        b_high += high(b_part, DTYPE)
    _finish(
        b_low, b_high, p_residual, p_weight, p_out, p_total, o_x, o_piece, mask, words, eps,
        DTYPE, NORM,
    )  # fmt: skip
    tl.store(p_uses + row, use)


@triton.jit
def sum_signalled(
    p_x,  # as `sum_stamped`
    p_residual,
    p_weight,
    p_out,
    p_total,
    p_peers,  # int32, one a rank: the ranks' mailboxes
    p_signals,  # int32 [programs, 2, WORLD], one a rank: number of each mailbox's last use
    p_uses,
    words,
    eps,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
):
    """One signal a row and sender, after the words: fewer bytes, two crossings of the link."""
    row = tl.program_id(0)
    o_piece = tl.arange(0, BLOCK)
    o_x = row * words + o_piece
    mask = o_piece < words
    use = tl.load(p_uses + row) + 1
    b_mine = tl.load(p_x + o_x, mask=mask, other=0)
    box = row * 2 + (use & 1)
    send_signalled(b_mine, p_peers, p_signals, box, o_piece, mask, use, RANK, WORLD, BLOCK)
    wait_for_signals(p_signals, box, use, RANK, WORLD)
    p_box = p_peers[RANK] + box * WORLD * BLOCK + o_piece
    b_low = tl.zeros([BLOCK], tl.float32)
    b_high = tl.zeros([BLOCK], tl.float32)
    for sender in tl.static_range(WORLD):
        b_part = b_mine
        if sender != RANK:
            # Past the first cache, which a peer's writes do not reach.
            b_part = tl.load(p_box + sender * BLOCK, mask=mask, other=0, cache_modifier=".cg")
        b_low += low(b_part, DTYPE)
        b_high += high(b_part, DTYPE)
    _finish(
        b_low, b_high, p_residual, p_weight, p_out, p_total, o_x, o_piece, mask, words, eps,
        DTYPE, NORM,
    )  # fmt: skip
    tl.store(p_uses + row, use)


@triton.jit
def share_stamped(
    p_x,  # int32 [words]: this rank's part
    p_out,  # int32 [WORLD, words]: every rank's part
    p_peers,  # as `sum_stamped`
    p_uses,
    words,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Pieces of any shape; kept instead of added."""
    program = tl.program_id(0)
    o_piece = tl.arange(0, BLOCK)
    o_x = program * BLOCK + o_piece
    mask = o_x < words
    use = tl.load(p_uses + program) + 1
    b_mine = tl.load(p_x + o_x, mask=mask, other=0)
    o_box = (program * 2 + (use & 1)) * (WORLD * BLOCK)
    send_stamped(b_mine, p_peers, o_box, o_piece, mask, use, RANK, WORLD, BLOCK)
    for sender in tl.static_range(WORLD):
        b_part = b_mine
        if sender != RANK:
            p_from = p_peers[RANK] + o_box + sender * BLOCK + o_piece
            b_part = receive_stamped(p_from, mask, use)
        tl.store(p_out + sender * words + o_x, b_part, mask=mask)
    tl.store(p_uses + program, use)


__all__ = ["share_stamped", "sum_signalled", "sum_stamped"]
