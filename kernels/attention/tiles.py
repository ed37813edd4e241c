"""Tile sizes of the attention kernels, chosen on the host from sizes known there.

Fixed tables: nothing is tuned while serving.
"""

from dataclasses import dataclass

MIN_SPLIT = 128
"""Keys of the smallest split of a decode row's context."""
PROGRAMS = 1024
"""Decode programs, also counting those without work, before splits are made longer."""
_MERGED = 8192
"""Elements of partial results that are merged at once."""


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


def decode_tile(group: int, dim: int, itemsize: int) -> Tile:
    """Tile of a decode row: all heads that share a KV head."""
    wide = dim * itemsize
    keys = 64 if wide <= 256 else 32 if wide <= 512 else 16
    return Tile(lines=max(16, power_of_two(group)), keys=keys, warps=4, stages=3)


def prefill_tile(rows: int, group: int, dim: int, itemsize: int) -> Tile:
    """Tile of a chunk of at most `rows` rows a sequence."""
    if itemsize == 4:  # products in full float32 run without tensor cores, from registers
        return Tile(lines=max(16, power_of_two(group)), keys=16, warps=4, stages=2)
    lines = max(16, power_of_two(group), min(128, power_of_two(rows * group)))
    keys = 64 if dim <= 128 else 32
    return Tile(lines=lines, keys=keys, warps=8 if lines >= 128 else 4, stages=3)


def split_tokens(pairs: int, max_context: int) -> int:
    """Keys of a split, a power of two, for `pairs` of a sequence and a KV head."""
    split = MIN_SPLIT
    while pairs * -(-max_context // split) > PROGRAMS and split < max_context:
        split *= 2
    return split


def merged_at_once(group: int, dim: int) -> int:
    """Partial results of a pair that are merged in one step; a power of two."""
    return max(1, min(16, _MERGED // (power_of_two(group) * power_of_two(dim))))


def power_of_two(number: int) -> int:
    """The smallest power of two that is not below a number >= 1."""
    return 1 << (number - 1).bit_length()


__all__ = [
    "MIN_SPLIT",
    "PROGRAMS",
    "Tile",
    "decode_tile",
    "merged_at_once",
    "power_of_two",
    "prefill_tile",
    "split_tokens",
]
