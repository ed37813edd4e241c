# mypy: ignore-errors
"""y += scale * h B^T of each row's own adapter, h in parts that are added in order.

program (column tile, row tile): rows of one segment x BLOCK_N columns of one site; its loop over
rank-rows is as long as that adapter's own r.
"""

import triton
import triton.language as tl

from kernels.lora.triton_rows import (
    choose,
    find_b,
    find_columns,
    find_rows,
    multiply,
    read_head,
    widen,
)
from kernels.triton_overlap import begin

_VARYING = [
    *("num_segments", "row_tiles", "stride_site"),
    *("o_head0", "o_head1", "o_head2"),
    *("start0", "start1", "start2", "width0", "width1", "width2"),
]


@triton.jit
def _sum_rows(p_h, m_rows, r, stride_part, PARTS: tl.constexpr, BLOCK_RANKS: tl.constexpr):
    """Return float32 h [rows, ranks], its parts added in a fixed order; p_h [rows]."""
    j = tl.arange(0, BLOCK_RANKS)
    mask = m_rows[:, None] & (j < r)[None, :]
    p_parts = p_h[:, None] + j[None, :]
    if PARTS == 1:
        b_h = tl.load(p_parts, mask=mask, other=0.0)
    else:
        part = tl.arange(0, triton.next_power_of_2(PARTS))
        p_parts = p_parts[None, :, :] + part.to(tl.int64)[:, None, None] * stride_part
        mask = mask[None, :, :] & (part < PARTS)[:, None, None]
        b_h = tl.sum(tl.load(p_parts, mask=mask, other=0.0), 0)
    return b_h


@triton.jit
def _sum_row(p_h, r, stride_part, PARTS: tl.constexpr, BLOCK_RANKS: tl.constexpr):
    """Return float32 h [ranks] of one row, its parts added in a fixed order."""
    part = tl.arange(0, triton.next_power_of_2(PARTS))
    j = tl.arange(0, BLOCK_RANKS)
    mask = (part < PARTS)[:, None] & (j < r)[None, :]
    p_parts = p_h + part.to(tl.int64)[:, None] * stride_part + j[None, :]
    return tl.sum(tl.load(p_parts, mask=mask, other=0.0), 0)


@triton.jit
def _add_rows(
    p_out,
    p_row,
    p_words,
    p_arena,
    b_y,
    b_h,
    b_b,
    first,
    stop,
    r,
    scale,
    n,
    width,
    stride_y,
    stride_part,
    max_rank,
    PARTS: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
    ITEM: tl.constexpr,
    USE_TURNS: tl.constexpr,
):
    """Add to rows first .. stop of y, one after the other, the next one's loads under way."""
    m_n = n < width
    for t in range(first, stop):
        more = t + 1 < stop
        m_next = n < tl.where(more, width, 0)
        b_y_next = tl.load(p_out + stride_y + n, mask=m_next, other=0.0)
        r_next = tl.where(more, r, 0)
        b_h_next = _sum_row(p_row + max_rank, r_next, stride_part, PARTS, BLOCK_RANKS)
        b_delta = tl.sum(b_h[:, None] * widen(b_b), 0)
        if USE_TURNS:
            for rank in range(BLOCK_RANKS, r, BLOCK_RANKS):
                p_b, m_b = find_b(p_words, p_arena, r, rank, BLOCK_RANKS, ITEM)
                b_turn = tl.load(p_b + n[None, :], mask=m_b & m_n[None, :], other=0.0)
                b_more = _sum_row(p_row + rank, r - rank, stride_part, PARTS, BLOCK_RANKS)
                b_delta += tl.sum(b_more[:, None] * widen(b_turn), 0)
        b_out = b_y.to(tl.float32) + scale * b_delta
        tl.store(p_out + n, b_out.to(p_out.dtype.element_ty), mask=m_n)
        p_out += stride_y
        p_row += max_rank
        b_y, b_h = b_y_next, b_h_next


@triton.jit(do_not_specialize=_VARYING)
def expand_kernel(
    p_y,
    p_h,
    p_arena,
    p_descriptors,
    p_offsets,
    p_numbers,
    num_segments,
    row_tiles,
    max_rank,
    stride_y,
    stride_part,
    stride_site,
    o_head0,
    o_head1,
    o_head2,
    start0,
    start1,
    start2,
    width0,
    width1,
    width2,
    SITES: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_SEGMENTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    VECTOR: tl.constexpr,
    ITEM: tl.constexpr,
    PRECISION: tl.constexpr,
    USE_DOT: tl.constexpr,
    USE_TURNS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    number, first, stop = find_rows(
        tl.program_id(1), p_offsets, p_numbers, num_segments, row_tiles, BLOCK_ROWS, BLOCK_SEGMENTS
    )
    if number < 0:
        begin(USE_PDL)
        return
    site, start, column, width = find_columns(
        *(tl.program_id(0), start0, start1, start2, width0, width1, width2),
        *(SITES, BLOCK_N, VECTOR),
    )
    n = column + tl.arange(0, BLOCK_N)
    p_record = p_descriptors + number
    o_head = choose(site, o_head0, o_head1, o_head2, SITES)
    first_word, r = read_head(p_record, o_head, max_rank)
    scale = tl.load(p_record + o_head + 1).to(tl.float64, bitcast=True).to(tl.float32)
    p_words = p_record + first_word + r
    p_b, m_b = find_b(p_words, p_arena.to(p_y.dtype), r, 0, BLOCK_RANKS, ITEM)
    b_b = tl.load(p_b + n[None, :], mask=m_b & (n < width)[None, :], other=0.0)
    begin(USE_PDL)
    if r == 0:
        return
    p_h += site.to(tl.int64) * stride_site
    p_y += start
    if USE_DOT:
        t = first + tl.arange(0, BLOCK_ROWS)
        m_t = t < stop
        p_out = p_y + t.to(tl.int64)[:, None] * stride_y
        b_y = tl.load(p_out + n[None, :], mask=m_t[:, None] & (n < width)[None, :], other=0.0)
        p_rows = p_h + t.to(tl.int64) * max_rank
        b_h = _sum_rows(p_rows, m_t, r, stride_part, PARTS, BLOCK_RANKS)
        m_n = (n < width)[None, :]
        b_delta = multiply(b_h, b_b, PRECISION)
        if USE_TURNS:
            for rank in range(BLOCK_RANKS, r, BLOCK_RANKS):
                p_turn, m_turn = find_b(p_words, p_arena.to(p_y.dtype), r, rank, BLOCK_RANKS, ITEM)
                b_turn = tl.load(p_turn + n[None, :], mask=m_turn & m_n, other=0.0)
                b_more = _sum_rows(p_rows + rank, m_t, r - rank, stride_part, PARTS, BLOCK_RANKS)
                b_delta += multiply(b_more, b_turn, PRECISION)
        b_out = (b_y.to(tl.float32) + scale * b_delta).to(p_y.dtype.element_ty)
        tl.store(p_out + n[None, :], b_out, mask=m_t[:, None] & m_n)
    else:
        p_out = p_y + first.to(tl.int64) * stride_y
        p_row = p_h + first.to(tl.int64) * max_rank
        b_y0 = tl.load(p_out + n, mask=n < width, other=0.0)
        b_h0 = _sum_row(p_row, r, stride_part, PARTS, BLOCK_RANKS)
        _add_rows(
            p_out,
            p_row,
            p_words,
            p_arena.to(p_y.dtype),
            b_y0,
            b_h0,
            b_b,
            first,
            stop,
            r,
            scale,
            n,
            width,
            stride_y,
            stride_part,
            max_rank,
            PARTS,
            BLOCK_RANKS,
            ITEM,
            USE_TURNS,
        )
