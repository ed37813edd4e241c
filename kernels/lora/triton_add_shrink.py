# mypy: ignore-errors
"""The first half of a LoRA delta of few rows: parts of h = x A^T, put into the exchange.

An item is (tile, site, part of K); a program is one warp.
"""

import triton
import triton.language as tl

from kernels.lora.triton_exchange import draw
from kernels.lora.triton_lanes import (
    BLOCK,
    INNER,
    LINE,
    OTHER,
    QUAD,
    RANKS,
    ROWS,
    along,
    find_site,
    find_tile,
    mma_order,
    offsets,
)
from kernels.lora.triton_rows import choose
from kernels.triton_overlap import begin


@triton.jit
def _find_a(p_arena, p_words, r, rank, ITEM: tl.constexpr):
    """Return (pointers, whether they are there) of rank-rows from `rank` on, 8 lines and 8 more."""
    j = rank + along(8, LINE) + along(2, OTHER) * 8
    return p_arena + offsets(p_words + j, j < r, ITEM), j < r


@triton.jit
def _load_a(p_a, m_a, k, K, EVEN_K: tl.constexpr):
    """Return A at columns k."""
    if EVEN_K:  # what is masked may be anything: it ends in rank-rows that aren't there
        m_k = m_a
        b_a = tl.load(p_a + k, mask=m_k)
    else:
        m_k = m_a & (k < K)
        b_a = tl.load(p_a + k, mask=m_k, other=0.0)
    return b_a


@triton.jit
def _load_x(p_rows, m_rows, k, K, EVEN_K: tl.constexpr):
    """Return x at columns k."""
    if EVEN_K:
        m_x = m_rows
        b_x = tl.load(p_rows + k, mask=m_x)
    else:
        m_x = m_rows & (k < K)
        b_x = tl.load(p_rows + k, mask=m_x, other=0.0)
    return b_x


@triton.jit
def _shrink_item(
    p_arena,
    p_words,
    p_out,
    p_a,
    m_a,
    b_a,
    p_rows,
    m_rows,
    b_x,
    k,
    r,
    launch,
    m_out,
    K,
    STEPS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    ITEM: tl.constexpr,
    USE_TURNS: tl.constexpr,
):
    """Put one part of a tile's h into the exchange; b_a, b_x: what it begins with."""
    for rank in range(0, r, RANKS):
        if USE_TURNS:  # the next ones on their way
            p_next, m_next = _find_a(p_arena, p_words, r, rank + RANKS, ITEM)
            b_next = _load_a(p_next, m_next, k, K, EVEN_K)
        right = tl.trans(mma_order(b_x, ROWS, BLOCK_K // 32))
        even = tl.dot(mma_order(b_a, RANKS, BLOCK_K // 32), right, input_precision="ieee")
        odd = tl.zeros((RANKS, ROWS), dtype=tl.float32)
        for step in tl.static_range(1, STEPS):
            k_step = k + step * BLOCK_K
            left = mma_order(_load_a(p_a, m_a, k_step, K, EVEN_K), RANKS, BLOCK_K // 32)
            b_step = _load_x(p_rows, m_rows, k_step, K, EVEN_K)
            right = tl.trans(mma_order(b_step, ROWS, BLOCK_K // 32))
            if step % 2 == 0:  # two sums: one product need not wait for the one before
                even = tl.dot(left, right, even, input_precision="ieee")
            else:
                odd = tl.dot(left, right, odd, input_precision="ieee")
        word = (even + odd).to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
        tl.store(p_out + rank, word | launch.to(tl.int64) << 32, mask=m_out)
        if USE_TURNS:
            p_a, m_a, b_a = p_next, m_next, b_next


@triton.jit
def shrink(
    p_x,
    p_arena,
    p_tiles,
    p_descriptors,
    p_exchange,
    p_counter,
    capacity,
    rows,
    shrinks,
    max_rank,
    room,
    K,
    stride_x,
    o_head0,
    o_head1,
    o_head2,
    SITES: tl.constexpr,
    PARTS: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    ITEM: tl.constexpr,
    USE_TURNS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    k_block = along(BLOCK_K // 32, BLOCK) * 32 + along(4, QUAD) * 8 + along(8, INNER)
    tiles = tl.load(p_tiles + 3, eviction_policy="evict_last")
    item, launch = tl.program_id(0), 0
    while item >= 0:
        site = (item // PARTS) % SITES
        part = item % PARTS
        number, first, stop = find_tile(p_tiles, item // (SITES * PARTS), capacity)
        if number >= 0:
            o_head = choose(site, o_head0, o_head1, o_head2, SITES)
            _, p_words, r = find_site(p_descriptors, number, o_head, max_rank)
            k = part * (STEPS * BLOCK_K) + k_block
            p_a, m_a = _find_a(p_arena, p_words, r, 0, ITEM)
            b_a = _load_a(p_a, m_a, k, K, EVEN_K)
            t = first + along(ROWS, LINE)
            p_rows = p_x + t.to(tl.int64) * stride_x
            if launch == 0:
                begin(USE_PDL)
            b_x = _load_x(p_rows, t < stop, k, K, EVEN_K)
            if launch == 0:
                launch = draw(p_counter)
            t_out = first + tl.arange(0, ROWS)[None, :]
            p_out = p_exchange + (site * rows + t_out).to(tl.int64) * (PARTS * room) + part * room
            _shrink_item(
                *(p_arena, p_words, p_out + tl.arange(0, RANKS)[:, None], p_a, m_a, b_a, p_rows),
                *(t < stop, b_x, k, r, launch, t_out < stop, K, STEPS, BLOCK_K, EVEN_K, ITEM),
                USE_TURNS,
            )
        item = tl.where(item + shrinks < tiles * (SITES * PARTS), item + shrinks, -1)
    if launch == 0:
        begin(USE_PDL)
        draw(p_counter)
