"""Dealing units to ranks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharding import Span, deal

worlds = st.integers(1, 12)
units = st.integers(0, 200)


@given(units, worlds, st.integers(0, 50))
def test_every_unit_is_dealt_once_in_rank_order(count: int, ranks: int, turn: int) -> None:
    spans = deal(count, ranks, turn)
    assert len(spans) == ranks
    assert [unit for span in spans for unit in span] == list(range(count))


@given(units, worlds, st.integers(0, 50))
def test_shares_differ_by_at_most_one(count: int, ranks: int, turn: int) -> None:
    sizes = [span.size for span in deal(count, ranks, turn)]
    assert max(sizes) - min(sizes) <= 1


@given(st.lists(units, min_size=1, max_size=40), worlds, st.integers(0, 50))
def test_totals_over_layers_differ_by_at_most_one(layers: list[int], ranks: int, turn: int) -> None:
    totals = [0] * ranks
    for count in layers:
        for rank, span in enumerate(deal(count, ranks, turn)):
            totals[rank] += span.size
        turn += count
    assert max(totals) - min(totals) <= 1


def test_extras_go_to_the_first_ranks_without_a_turn() -> None:
    assert deal(7, 3) == (Span(0, 3), Span(3, 5), Span(5, 7))


def test_a_turn_moves_the_extras_and_keeps_the_order() -> None:
    assert deal(7, 3, 2) == (Span(0, 2), Span(2, 4), Span(4, 7))


def test_ranks_beyond_the_units_hold_nothing() -> None:
    assert [span.size for span in deal(2, 5)] == [1, 1, 0, 0, 0]


@pytest.mark.parametrize(("count", "ranks", "turn"), [(-1, 2, 0), (3, 0, 0), (3, 2, -1)])
def test_impossible_deals_are_refused(count: int, ranks: int, turn: int) -> None:
    with pytest.raises(ValueError, match=f"units={count}, ranks={ranks}, turn={turn}"):
        deal(count, ranks, turn)


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2)])
def test_a_span_never_runs_backwards(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match="0 <= start <= stop"):
        Span(start, stop)


def test_a_span_is_a_slice_and_a_range() -> None:
    span = Span(2, 5)
    assert list("abcdefg"[span.slice]) == ["c", "d", "e"]
    assert list(span) == [2, 3, 4]
    assert span.size == 3


def test_the_last_unit_may_be_partial() -> None:
    assert Span(1, 3).times(64, 150) == Span(64, 150)
    assert Span(3, 3).times(64, 150) == Span(150, 150)
    assert Span(1, 3).times(64) == Span(64, 192)
