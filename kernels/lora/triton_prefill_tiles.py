# mypy: ignore-errors
"""Tiles of y whose delta comes from tensor cores, and thin ones: for the kernels of many rows.

y must go from memory to the lanes that hold its delta without a detour. A lane of a quad holds two
neighbouring columns of every eight of an accumulator, which is four bytes of y; so the columns of B
are dealt anew within every 32, and a lane's are the eight that make 16 bytes:

    column of the product   32 c + 8 j + 2 q + b      (q: lane of the quad, b < 2)
    column of y             32 c + 8 q + 2 j + b

Rows are dealt in the same manner, since warps have 16 rows of a product, but the loads of a tile
go by eights: both sides then have one layout, and nothing moves.

    row of the product      16 WARPS u + 16 w + 8 e + i      (w: warp, i < 8: lane / 4)
    row of y                16 WARPS u + 8 WARPS e + 8 w + i
"""

import triton
import triton.language as tl

from kernels.lora.triton_rows import find_b, widen

THIN = tl.constexpr(4)
"""Tiles of up to so many rows go row by row, without tensor cores: then all loads of a program's
rank-rows are under way at once, which is what a tile with little of y in it waits for."""
_RANKS = tl.constexpr(16)
"""Rank-rows of such a tile that are read at a time."""


@triton.jit
def deal_rows(BLOCK_ROWS: tl.constexpr, WARPS: tl.constexpr):
    """Return which row of y is at each row of the product."""
    row = tl.arange(0, BLOCK_ROWS)
    eight = (row // (16 * WARPS)) * 2 + (row // 8) % 2
    return (eight * WARPS + (row // 16) % WARPS) * 8 + row % 8


@triton.jit
def deal_columns(b_b):
    """[ranks, columns] of y -> [ranks, columns] of the product."""
    RANKS: tl.constexpr = b_b.shape[0]
    COLUMNS: tl.constexpr = b_b.shape[1]
    b_b = tl.reshape(b_b, (RANKS, COLUMNS // 32, 4, 4, 2))  # r c q j b
    return tl.reshape(tl.permute(b_b, (0, 1, 3, 2, 4)), (RANKS, COLUMNS))


@triton.jit
def as_y(b, WARPS: tl.constexpr):
    """[rows, columns] of the product -> [columns / 32 * rows, 32] of y, as `find_y` has it."""
    ROWS: tl.constexpr = b.shape[0]
    COLUMNS: tl.constexpr = b.shape[1]
    TURNS: tl.constexpr = ROWS // (16 * WARPS)
    b = tl.reshape(b, (TURNS, WARPS, 2, 8, COLUMNS // 32, 4, 4, 2))  # u w e i c j q b
    return tl.reshape(tl.permute(b, (4, 0, 2, 1, 3, 6, 5, 7)), (COLUMNS // 32 * ROWS, 32))


@triton.jit
def as_product(b, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WARPS: tl.constexpr):
    """The inverse of `as_y`."""
    TURNS: tl.constexpr = ROWS // (16 * WARPS)
    b = tl.reshape(b, (COLUMNS // 32, TURNS, 2, WARPS, 8, 4, 4, 2))  # c u e w i q j b
    return tl.reshape(tl.permute(b, (1, 3, 2, 4, 0, 6, 5, 7)), (ROWS, COLUMNS))


@triton.jit
def find_y(BLOCK_ROWS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return (row [.., 1], column [.., 32]) of each element of a tile of y."""
    i = tl.arange(0, BLOCK_ROWS * BLOCK_N // 32)
    column = (i // BLOCK_ROWS)[:, None] * 32 + tl.arange(0, 32)[None, :]
    return (i % BLOCK_ROWS)[:, None], column


@triton.jit
def read_h(
    p_h, t, stop, r, scale, stride_part, max_rank, PARTS: tl.constexpr, BLOCK_RANKS: tl.constexpr
):
    """Return float32 scale * h of rows t, [rows, ranks], the parts added in order."""
    j = tl.arange(0, BLOCK_RANKS)
    mask = (t < stop)[:, None] & (j < r)[None, :]
    p_rows = p_h + t.to(tl.int64)[:, None] * max_rank + j[None, :]
    b_h = tl.load(p_rows, mask=mask, other=0.0)
    for _ in tl.static_range(1, PARTS):
        p_rows += stride_part
        b_h += tl.load(p_rows, mask=mask, other=0.0)
    return b_h * scale


@triton.jit
def read_ranks(p_ranks, m_ranks, n, left, EVEN: tl.constexpr):
    """Return columns n of rank-rows that have `left` columns; EVEN: no fewer than n asks for."""
    if EVEN:
        b = tl.load(p_ranks + n[None, :], mask=m_ranks, other=0.0)
    else:
        b = tl.load(p_ranks + n[None, :], mask=m_ranks & (n < left)[None, :], other=0.0)
    return b


@triton.jit
def add_ranks(
    p_h, p_words, p_rows, r, n, m_n, stride_part, PARTS: tl.constexpr, ITEM: tl.constexpr
):
    """Return float32 h B of one row at columns n, for its h, the parts added in order."""
    b_delta = tl.zeros((n.shape[0],), dtype=tl.float32)
    for rank in range(0, r, _RANKS):
        p_b, m_b = find_b(p_words, p_rows, r, rank, _RANKS, ITEM)
        b_b = tl.load(p_b + n[None, :], mask=m_b & m_n[None, :], other=0.0)
        j = rank + tl.arange(0, _RANKS)
        b_h = tl.load(p_h + j, mask=j < r, other=0.0)
        for part in tl.static_range(1, PARTS):
            b_h += tl.load(p_h + part * tl.cast(stride_part, tl.int64) + j, mask=j < r, other=0.0)
        b_delta += tl.sum(b_h[:, None] * widen(b_b), 0)
    return b_delta
