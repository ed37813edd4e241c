"""Tiles cover each row once, and none has rows of two segments."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.lora.tiles import TILE_ROWS, tile_table

SEGMENTS = st.lists(st.tuples(st.integers(0, 70), st.sampled_from([-1, 0, 7, 12])), max_size=8)


@given(segments=SEGMENTS, spare=st.integers(0, 3))
def test_tiles_cover_the_rows_of_segments_once(segments: list[tuple[int, int]], spare: int) -> None:
    lengths, numbers = np.array(segments, np.int64).reshape(-1, 2).T
    exact = tile_table(lengths, numbers)
    table = tile_table(lengths, numbers, len(exact) + spare)
    count = int(table[0, 3])
    assert (table[:, 3] == count).all() and (table[count:, :3] == -1).all()
    assert len(exact) == max(count, 1) and (table[: len(exact)] == exact).all()
    owners = np.full(int(lengths.sum()), -2)
    for number, first, stop, _ in table[:count].tolist():
        assert 0 < stop - first <= TILE_ROWS and (owners[first:stop] == -2).all()
        owners[first:stop] = number
    assert (owners == np.repeat(numbers, lengths)).all()


def test_a_table_that_is_too_small_is_refused() -> None:
    with pytest.raises(AssertionError, match="2 tiles in a table of 1"):
        tile_table(np.array([TILE_ROWS + 1]), np.array([3]), 1)
