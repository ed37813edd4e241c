# mypy: ignore-errors
"""y += scale * (x A^T) B^T of each row's own adapter, in one launch.

    programs 0 .. shrinks - 1   h: (tile, site, part of K), their sums go to the exchange
    the programs after them     y: (tile, columns), which read B, then wait for the tile's h

A tile is up to 8 rows of one adapter. A program is one warp; it takes the items p, p + programs of
its kind, .., and only ever waits for programs of lower numbers, which were started before it.
"""

import triton
import triton.language as tl

from kernels.lora.triton_add_expand import expand
from kernels.lora.triton_add_shrink import shrink

_VARYING = [
    *("capacity", "rows", "shrinks", "max_rank", "stride_x"),
    *("o_head0", "o_head1", "o_head2"),
    *("start0", "start1", "start2", "width0", "width1", "width2"),
]


@triton.jit(do_not_specialize=_VARYING)
def add_kernel(
    p_x,
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
    K,
    stride_x,
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
    SHRINK_STEPS: tl.constexpr,
    EXPAND_STEPS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCKS: tl.constexpr,
    VECTOR: tl.constexpr,
    ITEM: tl.constexpr,
    PRECISION: tl.constexpr,
    ONE_ROW: tl.constexpr,
    USE_TURNS: tl.constexpr,
    HAS_BASE: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    p_rows = p_arena.to(p_x.dtype)
    if tl.program_id(0) < shrinks:
        shrink(
            *(p_x, p_rows, p_tiles, p_descriptors, p_exchange, p_counter),
            *(capacity, rows, shrinks, max_rank, room, K, stride_x, o_head0, o_head1, o_head2),
            *(SITES, PARTS, SHRINK_STEPS, BLOCK_K, EVEN_K, ITEM, USE_TURNS, USE_PDL),
        )
    else:
        expand(
            *(p_y, p_rows, p_tiles, p_descriptors, p_exchange, p_counter),
            *(capacity, rows, shrinks, max_rank, room, stride_y, o_head0, o_head1, o_head2),
            *(start0, start1, start2, width0, width1, width2),
            *(
                SITES,
                PARTS,
                EXPAND_STEPS,
                BLOCKS,
                VECTOR,
                ITEM,
                PRECISION,
                ONE_ROW,
                USE_TURNS,
                HAS_BASE,
                USE_PDL,
            ),
        )
