"""Cuts the segments of a step into tiles, on the host."""

import numpy as np
from numpy.typing import NDArray

TILE_ROWS = 8
"""Most rows of a tile."""


def tile_table(
    lengths: NDArray[np.int64],
    numbers: NDArray[np.int64],
    capacity: int | None = None,
) -> NDArray[np.int32]:
    """Return the tiles of a step's segments, int32 [C, 4], as `LoraSegments.tiles` holds them.

    `lengths` [G] are the rows of each segment, `numbers` [G] their descriptor numbers, -1: base
    rows. C is `capacity`, which must suffice, or else as many as there are, at least 1.
    """
    counts = -(-lengths // TILE_ROWS)
    count = int(counts.sum())
    segment = np.repeat(np.arange(counts.size), counts)
    within = np.arange(count) - np.repeat(np.cumsum(counts) - counts, counts)
    ends = np.cumsum(lengths)
    first = (ends - lengths)[segment] + within * TILE_ROWS
    table = np.full((max(count, 1) if capacity is None else capacity, 4), -1, np.int32)
    assert count <= len(table), f"{count} tiles in a table of {len(table)}"
    table[:count, 0] = numbers[segment]
    table[:count, 1] = first
    table[:count, 2] = np.minimum(first + TILE_ROWS, ends[segment])
    table[:, 3] = count
    return table


__all__ = ["TILE_ROWS", "tile_table"]
