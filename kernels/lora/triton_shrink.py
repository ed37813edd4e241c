# mypy: ignore-errors
"""h = x A^T of each row's own adapter, as parts of the sum over K.

program (part, tile, block): rows of one segment x rank-rows of one adapter x BLOCK_K
rank-rows of a launch's sites stand in one row:  [ site 0: r0 | site 1: r1 | site 2: r2 ]
                                                 [ block 0 | block 1 | ...
"""

import triton
import triton.language as tl

from kernels.lora.triton_rows import find_rank_rows, find_rows, read_offsets, widen
from kernels.triton_overlap import begin

_VARYING = [
    *("num_segments", "row_tiles", "stride_part", "stride_site"),
    *("o_head0", "o_head1", "o_head2"),
]


@triton.jit(do_not_specialize=_VARYING)
def shrink_kernel(
    p_x,
    p_h,
    p_arena,
    p_descriptors,
    p_offsets,
    p_numbers,
    num_segments,
    row_tiles,
    max_rank,
    K,
    stride_x,
    stride_part,
    stride_site,
    o_head0,
    o_head1,
    o_head2,
    SITES: tl.constexpr,
    BLOCK_SEGMENTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ITEM: tl.constexpr,
    USE_DOT: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    number, first, stop = find_rows(
        tl.program_id(1), p_offsets, p_numbers, num_segments, row_tiles, BLOCK_ROWS, BLOCK_SEGMENTS
    )
    if number < 0:
        begin(USE_PDL)
        return
    row = tl.program_id(2) * BLOCK_RANKS + tl.arange(0, BLOCK_RANKS)
    p_words, end, site, place = find_rank_rows(
        p_descriptors + number, o_head0, o_head1, o_head2, row, max_rank, SITES
    )
    m_ranks = row < end
    part = tl.program_id(0)
    k = part * BLOCK_K + tl.arange(0, BLOCK_K)
    m_k = k < K
    p_a = p_arena.to(p_x.dtype) + read_offsets(p_words, m_ranks, ITEM)[:, None]
    p_out = p_h + part.to(tl.int64) * stride_part + site.to(tl.int64) * stride_site + place
    if USE_DOT:
        t = first + tl.arange(0, BLOCK_ROWS)
        m_t = t < stop
        p_rows = p_x + t.to(tl.int64)[:, None] * stride_x
        b_a = tl.load(p_a + k[None, :], mask=m_ranks[:, None] & m_k[None, :], other=0.0)
        begin(USE_PDL)
        b_x = tl.load(p_rows + k[None, :], mask=m_t[:, None] & m_k[None, :], other=0.0)
        b_h = tl.dot(b_x, tl.trans(b_a), input_precision="ieee")
        p_out = p_out[None, :] + t.to(tl.int64)[:, None] * max_rank
        tl.store(p_out, b_h, mask=m_t[:, None] & m_ranks[None, :])
    else:
        b_a = tl.load(p_a + k[None, :], mask=m_ranks[:, None] & m_k[None, :], other=0.0)
        begin(USE_PDL)
        p_row = p_x + first.to(tl.int64) * stride_x
        p_h_row = p_out + first.to(tl.int64) * max_rank
        b_x = tl.load(p_row + k, mask=m_k, other=0.0)
        for t in range(first, stop):
            p_row += stride_x
            m_next = k < tl.where(t + 1 < stop, K, 0)
            b_next = tl.load(p_row + k, mask=m_next, other=0.0)
            b_h = tl.sum(widen(b_a) * b_x.to(tl.float32)[None, :], 1)
            tl.store(p_h_row, b_h, mask=m_ranks)
            p_h_row += max_rank
            b_x = b_next
