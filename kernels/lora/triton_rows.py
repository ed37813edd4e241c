# mypy: ignore-errors
"""Where a program's rows, columns and rank-rows are, for all LoRA kernels, and products with them.

Names: b_ blocks, p_ pointers, o_ offsets, m_ masks. Byte offsets and row starts are int64.
"""

import triton
import triton.language as tl


@triton.jit
def find_rows(
    tile,
    p_offsets,
    p_numbers,
    num_segments,
    row_tiles,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_SEGMENTS: tl.constexpr,
    HAS_BASE: tl.constexpr = False,
):
    """Return (descriptor number, first row, end row) of a tile; number -1: nothing to do.

    With BLOCK_SEGMENTS = 0 each segment has row_tiles tiles. Else each has as many as it fills,
    side by side, and BLOCK_SEGMENTS is a power of two that holds all segments. With HAS_BASE those
    of base rows have tiles too, of number -1.
    """
    if BLOCK_SEGMENTS == 0:
        segment = tile // row_tiles
        within = tile % row_tiles
    else:
        g = tl.arange(0, BLOCK_SEGMENTS)
        m_g = g < num_segments
        number_g = tl.load(p_numbers + g, mask=m_g, other=-1)
        rows_g = tl.load(p_offsets + g + 1, mask=m_g, other=0)
        rows_g -= tl.load(p_offsets + g, mask=m_g, other=0)
        tiles_g = tl.where((number_g >= 0) | HAS_BASE, (rows_g + BLOCK_ROWS - 1) // BLOCK_ROWS, 0)
        ends_g = tl.cumsum(tiles_g, 0)
        segment = tl.sum((ends_g <= tile).to(tl.int32), 0)
        within = tile - tl.sum(tl.where(g < segment, tiles_g, 0), 0)
    inside = segment < num_segments
    number = tl.load(p_numbers + segment, mask=inside, other=-1)
    first = tl.load(p_offsets + segment, mask=inside, other=0) + within * BLOCK_ROWS
    stop = tl.load(p_offsets + segment + 1, mask=inside, other=0)
    number = tl.where(first < stop, number, -1)
    return number, first, tl.minimum(stop, first + BLOCK_ROWS)


@triton.jit
def read_head(p_record, o_head, max_rank):
    """Return (first, r) of a site's entry; a rank beyond what h has room for reads as 0."""
    head = tl.load(p_record + o_head, eviction_policy="evict_last")
    r = (head & 0xFFFF).to(tl.int32)
    return head >> 16, tl.where(r <= max_rank, r, 0)


@triton.jit
def read_offsets(p_words, m_rows, ITEM: tl.constexpr):
    """Return int64 element offsets in the arena of rank-rows, whose bytes' are multiples of 16."""
    offsets = tl.load(p_words, mask=m_rows, other=0, eviction_policy="evict_last")
    return tl.multiple_of(offsets // ITEM, 16 // ITEM)


@triton.jit
def choose(i, v0, v1, v2, SITES: tl.constexpr):
    """Return v0, v1 or v2 for i = 0, 1, 2; the launch has SITES of them."""
    # One return: after a `return` in an if of a constant, the rest would still be compiled.
    if SITES == 1:
        chosen = v0
    elif SITES == 2:
        chosen = tl.where(i == 0, v0, v1)
    else:
        chosen = tl.where(i == 0, v0, tl.where(i == 1, v1, v2))
    return chosen


@triton.jit
def find_columns(
    block,
    start0,
    start1,
    start2,
    width0,
    width1,
    width2,
    SITES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Return (site, its first column in y, the block's first column in the site, its width).

    A launch's sites have as many blocks of BLOCK_N columns as they fill, one site after the other.
    Starts and widths come in units of VECTOR columns, so that wide loads are known to be aligned.
    """
    end0 = tl.cdiv(width0 * VECTOR, BLOCK_N)
    end1 = end0 + tl.cdiv(width1 * VECTOR, BLOCK_N)
    site = (block >= end0).to(tl.int32)
    if SITES > 2:
        site += (block >= end1).to(tl.int32)
    start = choose(site, start0, start1, start2, SITES) * VECTOR
    width = choose(site, width0, width1, width2, SITES) * VECTOR
    return site, start, (block - choose(site, 0, end0, end1, SITES)) * BLOCK_N, width


@triton.jit
def find_rank_rows(
    p_record,
    o_head0,
    o_head1,
    o_head2,
    row,
    max_rank,
    SITES: tl.constexpr,
):
    """Return (pointers to offsets, end of rows, site, place there) of rank-rows `row` of A.

    The rank-rows of a launch's sites stand side by side: site 0's, site 1's, site 2's.
    """
    first0, end0 = read_head(p_record, o_head0, max_rank)
    first1, end1, first2, end2 = first0, end0, first0, end0
    if SITES > 1:
        first1, r1 = read_head(p_record, o_head1, max_rank)
        end1 = end0 + r1
        end2 = end1
    if SITES > 2:
        first2, r2 = read_head(p_record, o_head2, max_rank)
        end2 = end1 + r2
    site = (row >= end0).to(tl.int32)
    if SITES > 2:
        site += (row >= end1).to(tl.int32)
    place = row - choose(site, 0, end0, end1, SITES)
    p_words = p_record + choose(site, first0, first1, first2, SITES) + place
    return p_words, end2, site, place


@triton.jit
def find_b(p_words, p_arena, r, rank, BLOCK_RANKS: tl.constexpr, ITEM: tl.constexpr):
    """Return (pointers, mask) [ranks, 1] of rank-rows rank .. rank + BLOCK_RANKS of B."""
    j = rank + tl.arange(0, BLOCK_RANKS)
    m_j = j < r
    return p_arena + read_offsets(p_words + j, m_j, ITEM)[:, None], m_j[:, None]


@triton.jit
def multiply(b_h, b_b, PRECISION: tl.constexpr):
    """Return float32 h B. bfloat16: h in two halves, which is as good as 16 bits of it."""
    if PRECISION == "halves":
        high = b_h.to(b_b.dtype)
        low = (b_h - high.to(tl.float32)).to(b_b.dtype)
        b_delta = tl.dot(high, b_b, tl.dot(low, b_b))
    else:
        b_delta = tl.dot(b_h, b_b.to(tl.float32), input_precision=PRECISION)
    return b_delta


@triton.jit
def widen(b):
    """Return b as float32, converted anew at every use.

    Rank-rows stay the same in a loop over rows; converted ahead of it, they would take twice their
    registers, and fewer programs would fit a multiprocessor. Two bfloat16 in a word need one
    instruction each.
    """
    if b.dtype == tl.bfloat16:
        words = tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
            "=r,=r,r",
            [b],
            dtype=tl.int32,
            is_pure=False,
            pack=2,
        )
        wide = words.to(tl.float32, bitcast=True)
    else:
        wide = b.to(tl.float32)
    return wide
