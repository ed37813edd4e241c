# mypy: ignore-errors
"""h = x A^T of steps of many rows, as parts of the sum over K: x streams by once for all sites.

program (block, part, tile): rank-rows of one adapter, of all sites x steps * BLOCK_K x rows of one
segment. Where the rank-rows make several blocks, these run side by side and share x in the cache.
"""

import triton
import triton.language as tl

from kernels.lora.triton_rows import find_rank_rows, find_rows, read_offsets
from kernels.triton_overlap import begin

_VARYING = [
    *("num_segments", "row_tiles", "stride_part", "stride_site"),
    *("o_head0", "o_head1", "o_head2", "steps"),
]


@triton.jit(do_not_specialize=_VARYING)
def prefill_shrink_kernel(
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
    steps,
    SITES: tl.constexpr,
    BLOCK_SEGMENTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    ITEM: tl.constexpr,
    EVEN: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    number, first, stop = find_rows(
        tl.program_id(2), p_offsets, p_numbers, num_segments, row_tiles, BLOCK_ROWS, BLOCK_SEGMENTS
    )
    if number < 0:
        begin(USE_PDL)
        return
    block = tl.program_id(0) * BLOCK_RANKS
    p_words, end, site, place = find_rank_rows(
        p_descriptors + number,
        o_head0,
        o_head1,
        o_head2,
        block + tl.arange(0, BLOCK_RANKS),
        max_rank,
        SITES,
    )
    if block >= end:
        begin(USE_PDL)
        return
    m_row = block + tl.arange(0, BLOCK_RANKS) < end
    m_ranks = m_row[:, None]
    part = tl.program_id(1)
    start = part * steps * BLOCK_K
    k = tl.arange(0, BLOCK_K)[None, :]
    p_a = p_arena.to(p_x.dtype) + read_offsets(p_words, m_row, ITEM)[:, None] + start + k
    t = first + tl.arange(0, BLOCK_ROWS)[:, None]
    m_t = t < stop
    p_rows = p_x + t.to(tl.int64) * stride_x + start + k
    b_h = tl.zeros((BLOCK_ROWS, BLOCK_RANKS), dtype=tl.float32)
    begin(USE_PDL)
    for step in tl.range(tl.minimum(steps, tl.cdiv(K - start, BLOCK_K)), num_stages=STAGES):
        o = step * BLOCK_K
        if EVEN:
            b_a = tl.load(p_a + o, mask=m_ranks, other=0.0)
            b_x = tl.load(p_rows + o, mask=m_t, other=0.0)
        else:
            m_k = k < K - start - o
            b_a = tl.load(p_a + o, mask=m_ranks & m_k, other=0.0)
            b_x = tl.load(p_rows + o, mask=m_t & m_k, other=0.0)
        b_h = tl.dot(b_x, tl.trans(b_a), b_h, input_precision="ieee")
    p_out = p_h + part.to(tl.int64) * stride_part + site.to(tl.int64) * stride_site + place
    p_out = p_out[None, :] + t.to(tl.int64) * max_rank
    tl.store(p_out, b_h, mask=m_t & m_row[None, :])
