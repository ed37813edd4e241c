"""Rows never overlap, stay in their page, are aligned, and fill pages before new ones begin."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tp_engine.adapters.layout import ROW_ALIGNMENT, Group, Run, place_rows

PAGE = 4096


@st.composite
def groups(draw: st.DrawFn) -> list[Group]:
    sizes = st.tuples(st.integers(1, 40), st.integers(0, PAGE // 4).map(lambda n: 4 * n))
    drawn = draw(st.lists(sizes, max_size=14))
    return [Group((0, i, "A"), rows, row_bytes) for i, (rows, row_bytes) in enumerate(drawn)]


def intervals(runs: list[Run]) -> list[tuple[int, int, int]]:
    """(page, begin, end) of every row, sorted."""
    found = []
    for run in runs:
        for row in range(run.count):
            begin = run.offset + row * run.group.stride
            found.append((run.page, begin, begin + run.group.row_bytes))
    return sorted(found)


@given(groups())
def test_rows_are_disjoint_aligned_and_inside_their_page(drawn: list[Group]) -> None:
    runs, count = place_rows(drawn, PAGE)
    rows = intervals(runs)
    assert all(begin % ROW_ALIGNMENT == 0 and end <= PAGE for _, begin, end in rows)
    assert all(a[0] != b[0] or a[2] <= b[1] for a, b in pairwise(rows))
    assert {page for page, _, _ in rows} == set(range(count))


@given(groups())
def test_every_row_has_one_place_in_order(drawn: list[Group]) -> None:
    runs, _ = place_rows(drawn, PAGE)
    for group in drawn:
        own = [run for run in runs if run.group.key == group.key]
        covered = [row for run in own for row in range(run.first, run.first + run.count)]
        assert covered == (list(range(group.rows)) if group.row_bytes else [])
        assert [run.page for run in own] == sorted(run.page for run in own)


@given(groups())
def test_no_page_is_opened_while_a_row_fits_elsewhere(drawn: list[Group]) -> None:
    runs, _ = place_rows(drawn, PAGE)
    filled: dict[int, int] = {}
    for run in runs:
        if run.page not in filled:
            assert all(PAGE - end < run.group.row_bytes for end in filled.values())
        filled[run.page] = run.offset + run.count * run.group.stride


@given(groups())
def test_a_group_is_split_only_where_no_rest_holds_it(drawn: list[Group]) -> None:
    runs, _ = place_rows(drawn, PAGE)
    filled: dict[int, int] = {}
    for run in runs:
        if run.first == 0 and run.count < run.group.rows:
            whole = (run.group.rows - 1) * run.group.stride + run.group.row_bytes
            assert all(PAGE - end < whole for end in filled.values())
        filled[run.page] = run.offset + run.count * run.group.stride


def test_short_rows_fill_the_rests_of_long_ones() -> None:
    long, short = Group((0, 0, "A"), 2, 3000), Group((0, 1, "A"), 14, 128)
    runs, count = place_rows([short, long], PAGE)
    assert count == 2
    assert [(r.group.row_bytes, r.page, r.offset, r.count) for r in runs] == [
        (3000, 0, 0, 1),
        (3000, 1, 0, 1),
        (128, 0, 3072, 8),
        (128, 1, 3072, 6),
    ]


def test_a_last_row_needs_no_padding() -> None:
    runs, count = place_rows([Group((0, 0, "A"), 1, 144)], 144)
    assert (count, runs[0].offset) == (1, 0)


def test_a_row_longer_than_a_page_is_refused_with_both_numbers() -> None:
    with pytest.raises(
        ValueError, match=r"4112 bytes \(B of model\.layers\.3\.self_attn\.v_proj\).*=4096"
    ):
        place_rows([Group((3, 2, "B"), 1, 4112)], PAGE)


@pytest.mark.parametrize("page_bytes", [0, -16, 100])
def test_odd_page_sizes_are_refused(page_bytes: int) -> None:
    with pytest.raises(ValueError, match=f"page_bytes={page_bytes}"):
        place_rows([], page_bytes)
