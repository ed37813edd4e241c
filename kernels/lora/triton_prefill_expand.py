# mypy: ignore-errors
"""y += scale * h B^T of steps of many rows: a stream of y, to which little is added.

program (column chunk, row tile): up to CHUNK columns of one site x rows of one segment; its h
stays where it is while the columns go by.
"""

import triton
import triton.language as tl

from kernels.lora.triton_prefill_tiles import (
    THIN,
    add_ranks,
    as_y,
    deal_columns,
    deal_rows,
    find_y,
    read_h,
    read_ranks,
)
from kernels.lora.triton_rows import (
    choose,
    find_b,
    find_columns,
    find_rows,
    multiply,
    read_head,
)
from kernels.triton_overlap import begin

_VARYING = [
    *("num_segments", "row_tiles", "stride_site"),
    *("o_head0", "o_head1", "o_head2"),
    *("start0", "start1", "start2", "width0", "width1", "width2"),
]


@triton.jit(do_not_specialize=_VARYING)
def prefill_expand_kernel(
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
    CHUNK: tl.constexpr,
    WARPS: tl.constexpr,
    STAGES: tl.constexpr,
    VECTOR: tl.constexpr,
    ITEM: tl.constexpr,
    PRECISION: tl.constexpr,
    EVEN: tl.constexpr,
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
        *(SITES, CHUNK, VECTOR),
    )
    left = width - column
    p_record = p_descriptors + number
    o_head = choose(site, o_head0, o_head1, o_head2, SITES)
    first_word, r = read_head(p_record, o_head, max_rank)
    scale = tl.load(p_record + o_head + 1).to(tl.float64, bitcast=True).to(tl.float32)
    p_words = p_record + first_word + r
    p_rows = p_arena.to(p_y.dtype) + column
    p_b, m_b = find_b(p_words, p_rows, r, 0, BLOCK_RANKS, ITEM)
    begin(USE_PDL)
    if r == 0:
        return
    p_h += site.to(tl.int64) * stride_site
    p_y += start + column
    if stop - first <= THIN:
        n = tl.arange(0, CHUNK)
        m_n = n < left
        o_row = first.to(tl.int64)
        for _ in range(first, stop):
            p_out = p_y + o_row * stride_y + n
            b_y = tl.load(p_out, mask=m_n, other=0.0)
            p_row = p_h + o_row * max_rank
            b_delta = add_ranks(p_row, p_words, p_rows, r, n, m_n, stride_part, PARTS, ITEM)
            b_out = b_y.to(tl.float32) + scale * b_delta
            tl.store(p_out, b_out.to(p_y.dtype.element_ty), mask=m_n)
            o_row += 1
        return
    t = first + deal_rows(BLOCK_ROWS, WARPS)
    b_h = read_h(p_h, t, stop, r, scale, stride_part, max_rank, PARTS, BLOCK_RANKS)
    row, i = find_y(BLOCK_ROWS, BLOCK_N)
    m_row = first + row < stop
    p_out = p_y + (first + row).to(tl.int64) * stride_y + i
    n = tl.arange(0, BLOCK_N)
    tiles = tl.cdiv(tl.minimum(left, CHUNK), BLOCK_N)
    for tile in tl.range(tiles, num_stages=STAGES):
        o = tile * BLOCK_N
        m_y = m_row if EVEN else m_row & (i < left - o)
        b_y = tl.load(p_out + o, mask=m_y, other=0.0)
        b_b = deal_columns(read_ranks(p_b + o, m_b, n, left - o, EVEN))
        b_delta = multiply(b_h, b_b, PRECISION)
        if USE_TURNS:
            for rank in range(BLOCK_RANKS, r, BLOCK_RANKS):
                p_more, m_more = find_b(p_words, p_rows, r, rank, BLOCK_RANKS, ITEM)
                b_more = deal_columns(read_ranks(p_more + o, m_more, n, left - o, EVEN))
                b_h_more = read_h(
                    p_h + rank,
                    t,
                    stop,
                    r - rank,
                    scale,
                    stride_part,
                    max_rank,
                    PARTS,
                    BLOCK_RANKS,
                )
                b_delta += multiply(b_h_more, b_more, PRECISION)
        b_out = b_y.to(tl.float32) + as_y(b_delta, WARPS)
        tl.store(p_out + o, b_out.to(p_y.dtype.element_ty), mask=m_y)
