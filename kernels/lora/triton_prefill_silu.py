# mypy: ignore-errors
"""silu(gate) * up of steps of many rows, with the deltas of gate and up added on the way.

They cost no pass of their own over the widest output of a layer, and the shrink of the next
projection none over its input: it takes the product where it is made.

program (column chunk, row tile): up to CHUNK columns of both halves x rows of one segment, of base
rows too.
"""

import triton
import triton.language as tl

from kernels.lora.triton_prefill_tiles import (
    THIN,
    add_ranks,
    as_product,
    as_y,
    deal_columns,
    deal_rows,
    find_y,
    read_h,
    read_ranks,
)
from kernels.lora.triton_rows import find_b, find_rows, multiply, read_head, widen
from kernels.triton_overlap import begin

_VARYING = ["num_segments", "stride_site", "o_head0", "o_head1", "o_head2"]
_RANKS = tl.constexpr(16)
"""Rank-rows of A that a row of a thin tile meets at a time."""


@triton.jit
def _find_half(p_record, o_head, p_rows, room, BLOCK_RANKS: tl.constexpr, ITEM: tl.constexpr):
    """Return (pointers to offsets, pointers, mask) of B's rank-rows, their count and scale."""
    first, r = read_head(p_record, o_head, room)
    scale = tl.load(p_record + o_head + 1).to(tl.float64, bitcast=True).to(tl.float32)
    p_words = p_record + first + r
    p_b, m_b = find_b(p_words, p_rows, r, 0, BLOCK_RANKS, ITEM)
    return p_words, p_b, m_b, r, scale


@triton.jit
def _activate(b_gate, b_up, dtype: tl.constexpr):
    """silu(gate) * up of float32 values, rounded where `silu_mul` after an expand would."""
    b_gate = b_gate.to(dtype).to(tl.float32)
    b_active = (b_gate / (1.0 + tl.exp(-b_gate))).to(dtype).to(tl.float32)
    return (b_active * b_up.to(dtype).to(tl.float32)).to(dtype)


@triton.jit(do_not_specialize=_VARYING)
def prefill_silu_kernel(
    p_y,
    p_h,
    p_out,
    p_down,
    p_arena,
    p_descriptors,
    p_offsets,
    p_numbers,
    num_segments,
    max_rank,
    width,
    stride_y,
    stride_part,
    stride_site,
    stride_down,
    o_head0,
    o_head1,
    o_head2,
    PARTS: tl.constexpr,
    BLOCK_SEGMENTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
    WARPS: tl.constexpr,
    STAGES: tl.constexpr,
    ITEM: tl.constexpr,
    PRECISION: tl.constexpr,
    EVEN: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    number, first, stop = find_rows(
        tl.program_id(1), p_offsets, p_numbers, num_segments, 1, BLOCK_ROWS, BLOCK_SEGMENTS, True
    )
    if first >= stop:
        begin(USE_PDL)
        return
    column = tl.program_id(0) * CHUNK
    left = width - column
    p_record = p_descriptors + tl.maximum(number, 0)
    room = tl.where(number < 0, 0, max_rank)  # the ranks of base rows read as 0
    p_rows = p_arena.to(p_y.dtype) + column
    p_words0, p_b0, m_b0, r0, scale0 = _find_half(
        p_record, o_head0, p_rows, room, BLOCK_RANKS, ITEM
    )
    p_words1, p_b1, m_b1, r1, scale1 = _find_half(
        p_record, o_head1, p_rows, room, BLOCK_RANKS, ITEM
    )
    first2, r2 = read_head(p_record, o_head2, room)
    p_a, m_a = find_b(p_record + first2, p_rows, r2, 0, BLOCK_RANKS, ITEM)
    begin(USE_PDL)
    dtype: tl.constexpr = p_y.dtype.element_ty
    p_y += column
    p_out += column
    p_down += tl.program_id(0).to(tl.int64) * stride_down
    p_h1 = p_h + tl.cast(stride_site, tl.int64)
    if stop - first <= THIN:
        n = tl.arange(0, CHUNK)
        m_n = n < left
        o_row = first.to(tl.int64)
        for _ in range(first, stop):
            b_gate = tl.load(p_y + o_row * stride_y + n, mask=m_n, other=0.0).to(tl.float32)
            b_up = tl.load(p_y + width + o_row * stride_y + n, mask=m_n, other=0.0).to(tl.float32)
            p_row = p_h + o_row * max_rank
            b_delta = add_ranks(p_row, p_words0, p_rows, r0, n, m_n, stride_part, PARTS, ITEM)
            b_gate += scale0 * b_delta
            p_row = p_h1 + o_row * max_rank
            b_delta = add_ranks(p_row, p_words1, p_rows, r1, n, m_n, stride_part, PARTS, ITEM)
            b_up += scale1 * b_delta
            b_out = _activate(b_gate, b_up, dtype)
            tl.store(p_out + o_row * width + n, b_out, mask=m_n)
            for rank in range(0, r2, _RANKS):
                p_turn, m_turn = find_b(p_record + first2, p_rows, r2, rank, _RANKS, ITEM)
                b_a = tl.load(p_turn + n[None, :], mask=m_turn & m_n[None, :], other=0.0)
                b_sum = tl.sum(widen(b_a) * b_out.to(tl.float32)[None, :], 1)
                j = rank + tl.arange(0, _RANKS)
                tl.store(p_down + o_row * max_rank + j, b_sum, mask=j < r2)
            o_row += 1
        return
    t = first + deal_rows(BLOCK_ROWS, WARPS)
    b_h0 = read_h(p_h, t, stop, r0, scale0, stride_part, max_rank, PARTS, BLOCK_RANKS)
    b_h1 = read_h(p_h1, t, stop, r1, scale1, stride_part, max_rank, PARTS, BLOCK_RANKS)
    row, i = find_y(BLOCK_ROWS, BLOCK_N)
    m_row = first + row < stop
    p_gate = p_y + (first + row).to(tl.int64) * stride_y + i
    p_out = p_out + (first + row).to(tl.int64) * width + i
    n = tl.arange(0, BLOCK_N)
    b_down = tl.zeros((BLOCK_ROWS, BLOCK_RANKS), dtype=tl.float32)
    tiles = tl.cdiv(tl.minimum(left, CHUNK), BLOCK_N)
    for tile in tl.range(tiles, num_stages=STAGES):
        o = tile * BLOCK_N
        m_y = m_row if EVEN else m_row & (i < left - o)
        b_gate = tl.load(p_gate + o, mask=m_y, other=0.0)
        b_up = tl.load(p_gate + width + o, mask=m_y, other=0.0)
        b_b0 = deal_columns(read_ranks(p_b0 + o, m_b0, n, left - o, EVEN))
        b_b1 = deal_columns(read_ranks(p_b1 + o, m_b1, n, left - o, EVEN))
        b_a = deal_columns(read_ranks(p_a + o, m_a, n, left - o, EVEN))
        b_gate = as_product(b_gate, BLOCK_ROWS, BLOCK_N, WARPS).to(tl.float32)
        b_up = as_product(b_up, BLOCK_ROWS, BLOCK_N, WARPS).to(tl.float32)
        b_gate += multiply(b_h0, b_b0, PRECISION)
        b_up += multiply(b_h1, b_b1, PRECISION)
        b_out = _activate(b_gate, b_up, dtype)
        tl.store(p_out + o, as_y(b_out, WARPS), mask=m_y)
        b_down = tl.dot(b_out, tl.trans(b_a), b_down, input_precision="ieee")
    j = tl.arange(0, BLOCK_RANKS)
    p_down = p_down + t.to(tl.int64)[:, None] * max_rank + j[None, :]
    tl.store(p_down, b_down, mask=(t < stop)[:, None] & (j < r2)[None, :])
