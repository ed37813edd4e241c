# mypy: ignore-errors
"""The second half of a LoRA delta of few rows: y += scale * h B^T, h from the exchange.

An item is (tile, columns of a site); a program is one warp.
"""

import triton
import triton.language as tl

from kernels.lora.triton_exchange import await_rows, draw
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
    from_read,
    offsets,
    to_write,
)
from kernels.lora.triton_rows import choose, find_columns, widen
from kernels.triton_overlap import begin

WIDTH = tl.constexpr(64)  # columns of B that a warp reads of a rank-row at once


@triton.jit
def _blocks(width0, width1, width2, BLOCK_N: tl.constexpr, VECTOR: tl.constexpr):
    """Return how many blocks of columns all sites have."""
    blocks = tl.cdiv(width0 * VECTOR, BLOCK_N) + tl.cdiv(width1 * VECTOR, BLOCK_N)
    return blocks + tl.cdiv(width2 * VECTOR, BLOCK_N)


@triton.jit
def _find_b(p_arena, p_words, r, rank, ITEM: tl.constexpr):
    """Return (pointers, whether there are any) of rank-rows from `rank` on.

    Rank-rows that aren't there, whose h is 0, are read as the last one: 0 times any is NaN.
    """
    other = along(4, OTHER)  # half, pair
    j = tl.minimum(rank + other // 2 * 8 + along(4, QUAD) * 2 + other % 2, r - 1)
    return p_arena + offsets(p_words + j, j >= 0, ITEM), j >= 0


@triton.jit
def _load_b(p_b, m_b, n, width, BLOCKS: tl.constexpr):
    """Return [columns, 16] of B at columns n."""
    b_b = tl.load(p_b + n, mask=m_b & (n < width))
    parts = tl.reshape(from_read(b_b), (BLOCKS, 2, 2, 8, 4, 4, 2))  # block half pair g q tile eight
    return tl.reshape(tl.permute(parts, (0, 5, 6, 3, 1, 4, 2)), (BLOCKS * WIDTH, RANKS))


@triton.jit
def _multiply(b_b, b_h, b_delta, PRECISION: tl.constexpr):
    """Return float32 B h + delta. bfloat16: h in two halves, which is as good as 16 bits of it."""
    if PRECISION == "halves":
        high = b_h.to(b_b.dtype)
        low = (b_h - high.to(tl.float32)).to(b_b.dtype)
        b_delta = tl.dot(b_b, high, tl.dot(b_b, low, b_delta))
    else:
        b_delta = tl.dot(b_b.to(tl.float32), b_h, b_delta, input_precision=PRECISION)
    return b_delta


@triton.jit
def _expand_item(
    p_y,
    p_arena,
    p_words,
    p_exchange,
    p_b,
    m_b,
    b_b,
    first,
    stop,
    site,
    start,
    n,
    width,
    r,
    scale,
    launch,
    rows,
    room,
    stride_y,
    PARTS: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCKS: tl.constexpr,
    ITEM: tl.constexpr,
    PRECISION: tl.constexpr,
    ONE_ROW: tl.constexpr,
    USE_TURNS: tl.constexpr,
    HAS_BASE: tl.constexpr,
):
    """Add a tile's delta to columns n of a site; b_b: the first of its columns of B."""
    last = stop
    stop = tl.where(r > 0, stop, first)
    if HAS_BASE:
        last = stop
    t = first + along(4, QUAD) * 2 + along(2, OTHER)
    p_out = p_y + t.to(tl.int64) * stride_y + start
    p_rows = p_exchange + (site * rows).to(tl.int64) * (PARTS * room)
    m_t = t < last
    if HAS_BASE:
        # Volatile, or the compiler might put off these loads until the wait is over.
        b_y = tl.load(p_out + n, mask=m_t & (n < width), volatile=True)
    if not USE_TURNS:
        b_h = await_rows(p_rows, first, stop, r, 0, room, launch, PARTS, ONE_ROW)
    for step in tl.static_range(STEPS):
        n_next = n + BLOCKS * WIDTH
        if step + 1 < STEPS:
            b_next = _load_b(p_b, m_b, n_next, width, BLOCKS)
            if HAS_BASE:
                b_y_next = tl.load(p_out + n_next, mask=m_t & (n_next < width))
        b_delta = tl.zeros((BLOCKS * WIDTH, ROWS), dtype=tl.float32)
        if USE_TURNS:
            for rank in range(0, r, RANKS):
                # The next rank-rows on their way; no more of them: r = 0.
                more = tl.where(r > rank + RANKS, r, 0)
                p_turn, m_turn = _find_b(p_arena, p_words, more, rank + RANKS, ITEM)
                b_turn = _load_b(p_turn, m_turn, n, width, BLOCKS)
                b_h = await_rows(p_rows, first, stop, r, rank, room, launch, PARTS, ONE_ROW)
                b_delta = _multiply(b_b, b_h, b_delta, PRECISION)
                b_b = b_turn
        else:
            b_delta = _multiply(b_b, b_h, b_delta, PRECISION)
        parts = tl.reshape(b_delta, (BLOCKS, 4, 2, 8, 4, 2))  # block tile eight g q odd
        b_delta = tl.reshape(tl.permute(parts, (0, 5, 3, 4, 1, 2)), (BLOCKS, 2, 8, 4, 8))
        if HAS_BASE:
            b_out = from_read(widen(b_y)) + scale * b_delta
        else:
            b_out = tl.where(r > 0, scale * b_delta, -0.0)  # added to anything it changes nothing
        tl.store(p_out + n, to_write(b_out.to(p_y.dtype.element_ty)), mask=m_t & (n < width))
        if step + 1 < STEPS:
            n, b_b = n_next, b_next
            if HAS_BASE:
                b_y = b_y_next


@triton.jit
def expand(
    p_y,
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
    stride_y,
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
    STEPS: tl.constexpr,
    BLOCKS: tl.constexpr,
    VECTOR: tl.constexpr,
    ITEM: tl.constexpr,
    PRECISION: tl.constexpr,
    ONE_ROW: tl.constexpr,
    USE_TURNS: tl.constexpr,
    HAS_BASE: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    BLOCK_N: tl.constexpr = STEPS * BLOCKS * WIDTH
    tiles = tl.load(p_tiles + 3, eviction_policy="evict_last")
    programs = tl.num_programs(0) - shrinks
    blocks = _blocks(width0, width1, width2, BLOCK_N, VECTOR)
    item, launch = tl.program_id(0) - shrinks, 0
    while item >= 0:
        number, first, stop = find_tile(p_tiles, item // blocks, capacity)
        is_wanted = number >= 0 if HAS_BASE else stop >= 0
        if is_wanted:
            site, start, within, width = find_columns(
                *(item % blocks, start0, start1, start2, width0, width1, width2),
                *(SITES, BLOCK_N, VECTOR),
            )
            o_head = choose(site, o_head0, o_head1, o_head2, SITES)
            p_record, p_words, r = find_site(p_descriptors, number, o_head, max_rank)
            scale = tl.load(p_record + o_head + 1, eviction_policy="evict_last")
            scale = scale.to(tl.float64, bitcast=True).to(tl.float32)
            n = within + along(BLOCKS, BLOCK) * WIDTH + along(8, LINE) * 8 + along(8, INNER)
            p_b, m_b = _find_b(p_arena, p_words + r, r, 0, ITEM)
            b_b = _load_b(p_b, m_b, n, width, BLOCKS)
            if launch == 0:
                begin(USE_PDL)
                launch = draw(p_counter)
            _expand_item(
                *(p_y, p_arena, p_words + r, p_exchange, p_b, m_b, b_b, first, stop, site, start),
                *(n, width, r, scale, launch, rows, room, stride_y),
                *(PARTS, STEPS, BLOCKS, ITEM, PRECISION, ONE_ROW, USE_TURNS, HAS_BASE),
            )
        item = tl.where(item + programs < tiles * blocks, item + programs, -1)
    if launch == 0:
        begin(USE_PDL)
        draw(p_counter)
