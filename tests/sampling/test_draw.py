from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tp_engine.sampling.draw import DrawParams, draw

LAST = 1 - 2**-53
"""The largest random number."""


def params(uniform: list[float], **changes: float) -> DrawParams:
    numbers = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | changes
    columns = {
        name: torch.full((len(uniform),), value, dtype=torch.float64)
        for name, value in numbers.items()
    }
    columns["top_k"] = columns["top_k"].long()
    return DrawParams(uniform=torch.tensor(uniform, dtype=torch.float64), **columns)


@pytest.mark.parametrize("ranked", [False, True])
def test_the_extreme_random_numbers_draw_the_first_and_the_last_possible_token(
    ranked: bool,
) -> None:
    row = [0.0, 0.0, -2.0, -math.inf, -200.0]
    values = torch.tensor([row, row])
    assert draw(values, params([0.0, LAST]), ranked=ranked).tolist() == [0, 2]


def test_tokens_without_a_chance_are_never_drawn_wherever_they_stand() -> None:
    row = [-math.inf, -math.inf, 1.0, -math.inf, 1.0, -math.inf]
    values = torch.tensor([row] * 4)
    got = draw(values, params([0.0, 0.4999, 0.5, LAST]), ranked=False)
    assert got.tolist() == [2, 2, 4, 4]


@settings(deadline=None)
@given(st.integers(1, 3000), st.floats(-30, 30, width=32), st.integers(0, 2**32))
def test_the_largest_random_number_stays_inside_the_row(
    columns: int, spread: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(1, columns, generator=generator) * spread
    values = values.sort(dim=1, descending=True).values
    for ranked in (False, True):
        column = int(draw(values, params([LAST]), ranked=ranked))
        assert 0 <= column < columns


def test_the_place_in_the_cumulative_distribution_decides() -> None:
    values = torch.tensor([0.5, 0.3, 0.2]).log().expand(6, -1)
    uniform = [0.0, 0.499, 0.501, 0.799, 0.801, LAST]
    for ranked in (False, True):
        got = draw(values, params(uniform), ranked=ranked)
        assert got.tolist() == [0, 0, 1, 1, 2, 2]


def test_top_p_includes_the_token_that_reaches_it_and_not_the_next() -> None:
    values = torch.tensor([0.5, 0.25, 0.25]).log()[None]
    for top_p, last in [(0.25, 0), (0.5, 0), (0.5 + 1e-6, 1), (0.75, 1), (0.75 + 1e-6, 2)]:
        assert draw(values, params([LAST], top_p=top_p), ranked=True).tolist() == [last]
