"""Tile sizes that every launch can rely on."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.attention.tiles import (
    PREFILL_PROGRAMS,
    PROGRAMS,
    decode_splits,
    decode_tile,
    merged_at_once,
    power_of_two,
    prefill_splits,
    prefill_tile,
)


@given(st.integers(1, 4096), st.integers(1, 1 << 20))
def test_splits_fit_the_workspace_and_the_context(pairs: int, context: int) -> None:
    tile = decode_tile(pairs, context, 128, 2)
    splits = decode_splits(pairs, context, tile)
    assert splits == 1 or pairs * splits <= PROGRAMS
    assert 1 <= splits <= -(-context // tile.min_split)
    splits = prefill_splits(pairs, context)
    assert splits == 1 or pairs * splits <= PREFILL_PROGRAMS


@given(st.integers(1, 64), st.integers(8, 256), st.sampled_from([2, 4]), st.integers(1, 8192))
def test_tiles_hold_a_group_and_divide_a_split(
    group: int, dim: int, itemsize: int, rows: int
) -> None:
    tile = prefill_tile(rows, group, dim, itemsize)
    assert tile.lines == power_of_two(tile.lines) >= max(16, group)
    assert tile.keys == power_of_two(tile.keys) >= 16
    decode = decode_tile(group, rows, dim, itemsize)
    assert decode.keys == power_of_two(decode.keys) >= 16
    assert decode.min_split % decode.keys == 0
    assert merged_at_once(group, dim) == power_of_two(merged_at_once(group, dim)) <= 16


@pytest.mark.parametrize(("number", "power"), [(1, 1), (2, 2), (3, 4), (128, 128), (129, 256)])
def test_power_of_two(number: int, power: int) -> None:
    assert power_of_two(number) == power
