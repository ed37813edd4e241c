# mypy: ignore-errors
"""How tensors are read so that each lane gets what it needs of the tensor cores' operands.

A load has rank 5: [block, other, line, quad, inner], 8 lines, 4 quads, and 8 inner elements of 16
bits side by side in memory, which a lane reads at once. Lane 4 line + quad holds, of an operand
with 8 rows x 16 columns, what belongs to row `line` and column pairs `quad` and `quad` + 4: no
value moves to another lane. The order of the dimension that a product sums over is a permutation,
the same for both operands.
"""

import triton
import triton.language as tl

from kernels.lora.tiles import TILE_ROWS
from kernels.lora.triton_rows import read_head

ROWS = tl.constexpr(TILE_ROWS)
RANKS = tl.constexpr(16)  # rank-rows at a time
# The compiler deals lanes to dimensions of equal strides from the last one on, and before version
# 3.7 from the first one on: to the quads, then to the lines, in either case.
_FIRST = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)
LANES_FIRST = tl.constexpr(_FIRST)
BLOCK, OTHER, LINE, QUAD = map(tl.constexpr, (2, 3, 1, 0) if _FIRST else (0, 1, 2, 3))
INNER = tl.constexpr(4)


@triton.jit
def along(n: tl.constexpr, DIMENSION: tl.constexpr):
    """Return 0 .. n - 1 of rank 5, along one of the dimensions above."""
    i = tl.arange(0, n)
    if DIMENSION == 0:
        index = tl.expand_dims(i, (1, 2, 3, 4))
    elif DIMENSION == 1:
        index = tl.expand_dims(i, (0, 2, 3, 4))
    elif DIMENSION == 2:
        index = tl.expand_dims(i, (0, 1, 3, 4))
    elif DIMENSION == 3:
        index = tl.expand_dims(i, (0, 1, 2, 4))
    else:
        index = tl.expand_dims(i, (0, 1, 2, 3))
    return index


@triton.jit
def from_read(b):
    """Return what was read as [block, other, line, quad, inner]."""
    if LANES_FIRST:
        b = tl.permute(b, (2, 3, 1, 0, 4))
    return b


@triton.jit
def to_write(b):
    """Undo `from_read`."""
    if LANES_FIRST:
        b = tl.permute(b, (3, 2, 0, 1, 4))
    return b


@triton.jit
def mma_order(b, LINES: tl.constexpr, BLOCKS: tl.constexpr):
    """What was read of LINES lines -> [LINES, BLOCKS * 32], moving nothing."""
    parts = tl.reshape(
        from_read(b), (BLOCKS, LINES // 8, 8, 4, 2, 2, 2)
    )  # block eight g q step half pair
    return tl.reshape(tl.permute(parts, (1, 2, 0, 4, 5, 3, 6)), (LINES, BLOCKS * 32))


@triton.jit
def offsets(p_words, mask, ITEM: tl.constexpr):
    """Return int64 element offsets of rank-rows, whose bytes' are multiples of 16; rank 5."""
    offsets = tl.load(p_words, mask=mask, other=0, eviction_policy="evict_last") // ITEM
    UNIT: tl.constexpr = 16 // ITEM
    return tl.multiple_of(offsets, [UNIT, UNIT, UNIT, UNIT, UNIT])


@triton.jit
def find_tile(p_tiles, tile, capacity):
    """Return (descriptor number, first row, end row) of a tile; end row -1: no such tile."""
    p_tile = p_tiles + tile * 4
    inside = tile < capacity
    number = tl.load(p_tile, mask=inside, other=-1, eviction_policy="evict_last")
    first = tl.load(p_tile + 1, mask=inside, other=-1, eviction_policy="evict_last")
    stop = tl.load(p_tile + 2, mask=inside, other=-1, eviction_policy="evict_last")
    return number, first, stop


@triton.jit
def find_site(p_descriptors, number, o_head, max_rank):
    """Return (record, its site's first offset, r) of a tile; r = 0: nothing to add."""
    p_record = p_descriptors + tl.maximum(number, 0)
    first_word, r = read_head(p_record, o_head, tl.where(number < 0, 0, max_rank))
    return p_record, p_record + first_word, r
