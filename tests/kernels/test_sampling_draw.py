"""Draws by their definition, on CPU."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.dispatch import Ops
from kernels.sampling import DrawParams
from tests.kernels.truth import REFERENCE

LAST = 1 - 2**-53
"""The largest random number."""
RANKED = {"top_k": 2**40}
"""Keeps all, and orders tokens by logit."""


def params(uniform: list[float], **changes: float) -> DrawParams:
    numbers = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | changes
    columns = {
        name: torch.full((len(uniform),), value, dtype=torch.float64)
        for name, value in numbers.items()
    }
    columns["top_k"] = columns["top_k"].long()
    return DrawParams(uniform=torch.tensor(uniform, dtype=torch.float64), **columns)


def draw(ops: Ops, values: torch.Tensor, given: DrawParams) -> list[int]:
    """Columns of all rows; both implementations must agree."""
    rows, top = torch.arange(values.shape[0]), values.amax(dim=1)
    columns = ops.draw(values, rows, top, given)
    assert torch.equal(columns, REFERENCE.draw(values, rows, top, given))
    return columns.tolist()


@pytest.mark.parametrize("order", [{}, RANKED], ids=["by column", "by rank"])
def test_the_extreme_random_numbers_draw_the_first_and_the_last_possible_token(
    ops: Ops, order: dict[str, int]
) -> None:
    row = [0.0, 0.0, -2.0, -math.inf, -200.0]
    assert draw(ops, torch.tensor([row, row]), params([0.0, LAST], **order)) == [0, 2]


def test_tokens_without_a_chance_are_never_drawn_wherever_they_stand(ops: Ops) -> None:
    row = [-math.inf, -math.inf, 1.0, -math.inf, 1.0, -math.inf]
    got = draw(ops, torch.tensor([row] * 4), params([0.0, 0.4999, 0.5, LAST]))
    assert got == [2, 2, 4, 4]


def test_order_by_rank_puts_the_best_first_and_equals_by_column(ops: Ops) -> None:
    values = torch.tensor([[0.0, 1.0, 0.0, 1.0]] * 4)
    numbers = [0.0, 0.4, 0.8, LAST]
    assert draw(ops, values, params(numbers)) == [0, 1, 3, 3]
    assert draw(ops, values, params(numbers, **RANKED)) == [1, 3, 0, 2]


@settings(deadline=None)
@given(st.integers(1, 3000), st.floats(-30, 30, width=32), st.integers(0, 2**32))
def test_the_largest_random_number_stays_inside_the_row(
    columns: int, spread: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(1, columns, generator=generator) * spread
    for order in ({}, RANKED):
        (column,) = draw(REFERENCE, values, params([LAST], **order))
        assert 0 <= column < columns


def test_the_place_in_the_cumulative_distribution_decides(ops: Ops) -> None:
    values = torch.tensor([0.5, 0.3, 0.2]).log().expand(6, -1)
    uniform = [0.0, 0.499, 0.501, 0.799, 0.801, LAST]
    for order in ({}, RANKED):
        assert draw(ops, values, params(uniform, **order)) == [0, 0, 1, 1, 2, 2]


def test_top_p_includes_the_token_that_reaches_it_and_not_the_next(ops: Ops) -> None:
    values = torch.tensor([0.5, 0.25, 0.25]).log()[None]
    for top_p, last in [(0.25, 0), (0.5, 0), (0.5 + 1e-6, 1), (0.75, 1), (0.75 + 1e-6, 2)]:
        assert draw(ops, values, params([LAST], top_p=top_p)) == [last]


def test_rows_are_taken_by_number_and_those_without_a_best_are_left_alone(ops: Ops) -> None:
    values = torch.tensor([[0.0, 9.0], [math.nan, 0.0], [9.0, 0.0]])
    top = torch.tensor([9.0, math.nan, 9.0, math.inf])
    got = ops.draw(values, torch.tensor([2, 1, 0, 2]), top, params([0.5] * 4))
    assert got.tolist() == [0, 0, 1, 0]


def test_wrong_inputs_are_named(ops: Ops) -> None:
    values, rows, top = torch.zeros(2, 3), torch.arange(2), torch.zeros(2)
    with pytest.raises(ValueError, match="logits must be"):
        ops.draw(values[0], rows, top, params([0.0, 0.0]))
    with pytest.raises(ValueError, match="rows must be"):
        ops.draw(values, rows.int(), top, params([0.0, 0.0]))
    with pytest.raises(ValueError, match="top must be"):
        ops.draw(values, rows, top.double(), params([0.0, 0.0]))
    with pytest.raises(ValueError, match=r"params\.temperature must be"):
        ops.draw(values, rows, top, params([0.0]))
