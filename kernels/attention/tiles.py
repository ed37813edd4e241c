"""Tile sizes of the attention kernels, chosen on the host from sizes known there.

Fixed tables: nothing is tuned while serving.
"""

from dataclasses import dataclass

from kernels.sizes import HOPPER_ROOM, power_of_two

PROGRAMS = 256
"""Most decode programs of a launch that splits contexts; with more, joining costs what it gains."""
FEW_PAIRS = 128
"""Pairs of a sequence and a KV head from which on a multiprocessor has several."""
FUSED_PAIRS = 512
"""Most pairs for which rotation and decode are one launch."""
SHORT_CONTEXT = 1024
"""Bound of the contexts that count as short."""
PREFILL_PROGRAMS = 256
"""Most prefill programs of a launch that splits contexts."""
_PREFILL_SPLITS = 4
"""More took longer to join than they saved, at contexts of 2048 to 8000."""
HOPPER_ITEMS = 96
"""Tiles of rows and a KV head from which on the Hopper kernel is faster than splits."""
_MERGED = 8192
"""Elements of partial results that are merged at once."""
_ROOMY = 140 << 10
"""Shared memory of the tiles that take most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """How one program of an attention kernel works."""

    lines: int
    """Query rows times heads; a power of two, at least 16 and at least the heads of a group."""
    keys: int
    """Keys a step; a power of two."""
    warps: int
    stages: int
    """Loads in flight."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeTile:
    """How one program of the decode kernel works."""

    keys: int
    """Keys a step; a power of two."""
    warps: int
    stages: int
    """Loads in flight."""
    min_split: int
    """Keys of the smallest split; a multiple of `keys`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HopperTile:
    """How one program of the Hopper prefill kernel works."""

    keys: int
    """Keys a step: 64 or 128, whole pages."""
    stages: int
    """Steps that are copied ahead."""
    each: int
    """Tiles of one KV head that a program takes one after the other."""


def hopper_tile(items: int) -> HopperTile:
    """Tile for so many tiles of rows and a KV head."""
    return HopperTile(keys=128, stages=2, each=4 if items >= 2000 else 1)


def decode_tile(
    pairs: int, max_context: int, dim: int, itemsize: int, room: int = HOPPER_ROOM
) -> DecodeTile:
    """Tile for `pairs` of a sequence and a KV head, in `room` of shared memory.

    A row of a short context is best done in one step, many rows in small ones that run side by
    side on a multiprocessor; behind long contexts loads have to be in flight all the time.
    """
    wide = dim * itemsize
    if wide > 256:
        return DecodeTile(keys=32 if wide <= 512 else 16, warps=4, stages=3, min_split=256)
    if pairs < FEW_PAIRS and max_context <= SHORT_CONTEXT and room >= _ROOMY:
        return DecodeTile(keys=256, warps=8, stages=2, min_split=256)
    if pairs <= FUSED_PAIRS and max_context <= SHORT_CONTEXT:
        return DecodeTile(keys=32, warps=4, stages=3, min_split=256)
    return DecodeTile(keys=64, warps=4, stages=3, min_split=256)


def decode_splits(pairs: int, max_context: int, tile: DecodeTile) -> int:
    """Most splits of a context, for `pairs` of a sequence and a KV head."""
    return max(1, min(PROGRAMS // pairs, -(-max_context // tile.min_split)))


def prefill_splits(tiles: int, max_context: int) -> int:
    """Most splits of the keys of a tile, for `tiles` of rows and a KV head."""
    return max(1, min(_PREFILL_SPLITS, PREFILL_PROGRAMS // tiles, -(-max_context // 256)))


def prefill_tile(rows: int, group: int, dim: int, itemsize: int, room: int = HOPPER_ROOM) -> Tile:
    """Tile of a chunk of at most `rows` rows a sequence, in `room` of shared memory."""
    if itemsize == 4:  # products in full float32 run without tensor cores, from registers
        return Tile(lines=max(16, power_of_two(group)), keys=16, warps=4, stages=2)
    # Partial results of 128 lines of more than 128 values would not fit into shared memory.
    most = (128 if dim <= 128 else 64) // (1 if room >= _ROOMY else 2)
    lines = max(16, power_of_two(group), min(most, power_of_two(rows * group)))
    keys = 64 if dim <= 128 else 32
    return Tile(lines=lines, keys=keys, warps=8 if lines >= 128 else 4, stages=3)


def merged_at_once(group: int, dim: int) -> int:
    """Partial results of a pair that are merged in one step; a power of two."""
    return max(1, min(16, _MERGED // (power_of_two(group) * power_of_two(dim))))


__all__ = [
    "FEW_PAIRS",
    "FUSED_PAIRS",
    "HOPPER_ITEMS",
    "PREFILL_PROGRAMS",
    "PROGRAMS",
    "SHORT_CONTEXT",
    "DecodeTile",
    "HopperTile",
    "Tile",
    "decode_splits",
    "decode_tile",
    "hopper_tile",
    "merged_at_once",
    "power_of_two",
    "prefill_splits",
    "prefill_tile",
]
