"""Tile sizes that every launch can rely on."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.attention.tiles import (
    MIN_SPLIT,
    PROGRAMS,
    decode_tile,
    merged_at_once,
    power_of_two,
    prefill_tile,
    split_tokens,
)


@given(st.integers(1, 4096), st.integers(1, 1 << 20))
def test_splits_are_as_short_as_the_programs_allow(pairs: int, context: int) -> None:
    split = split_tokens(pairs, context)
    assert split == power_of_two(split) >= MIN_SPLIT
    splits = -(-context // split)
    assert splits == 1 or pairs * splits <= PROGRAMS
    if split > MIN_SPLIT:
        assert pairs * -(-context // (split // 2)) > PROGRAMS


@given(st.integers(1, 64), st.integers(8, 256), st.sampled_from([2, 4]), st.integers(1, 8192))
def test_tiles_hold_a_group_and_divide_a_split(
    group: int, dim: int, itemsize: int, rows: int
) -> None:
    for tile in (decode_tile(group, dim, itemsize), prefill_tile(rows, group, dim, itemsize)):
        assert tile.lines == power_of_two(tile.lines) >= max(16, group)
        assert tile.keys == power_of_two(tile.keys) >= 16
        assert MIN_SPLIT % tile.keys == 0
    assert merged_at_once(group, dim) == power_of_two(merged_at_once(group, dim)) <= 16


@pytest.mark.parametrize(("number", "power"), [(1, 1), (2, 2), (3, 4), (128, 128), (129, 256)])
def test_power_of_two(number: int, power: int) -> None:
    assert power_of_two(number) == power
