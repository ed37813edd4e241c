"""The Triton samplers against their sorted definition."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels.sampling import (
    MASS_BITS,
    DrawParams,
    Penalties,
    gpu,
    keys,
    reference,
    select_kernel,
)
from kernels.sampling.select_kernel import MAX_SUM
from tests.kernels.truth import bits

SMALL = {"lanes": 32, "listed": 16}
"""Tiles of 256 logits and lists of 16, so that short rows take every way."""


def rows_of(kind: str, rows: int, columns: int) -> torch.Tensor:
    values = torch.randn(rows, columns) * 3
    if kind == "ties":
        values = values.round()
    elif kind == "equal":
        values[:] = 2.0
    elif kind == "holes":
        values[:, ::2] = -math.inf
    elif kind == "zeros":
        values = (values.sign() * (values.abs() > 3)) * 0.0
    return values


KINDS = ("spread", "ties", "equal", "holes", "zeros")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("columns", [0, 1, 7, 1024, 2500])
@pytest.mark.parametrize("kind", KINDS)
def test_greedy(kind: str, columns: int, dtype: torch.dtype) -> None:
    logits, slots = rows_of(kind, 3, columns).to(dtype), torch.tensor([4, 0, 2])
    last, expected_last = torch.full((6,), -1), torch.full((6,), -1)
    best = gpu.greedy(logits, 100, slots, last)
    assert torch.equal(best, reference.greedy(logits, 100, slots, expected_last))
    assert torch.equal(last, expected_last)


@pytest.mark.parametrize("broken", [math.nan, math.inf])
@pytest.mark.parametrize("column", [0, 1023, 1024, 2499])
def test_a_broken_row_is_marked_alone(broken: float, column: int) -> None:
    logits = torch.randn(3, 2500)
    logits[1, column] = broken
    last = torch.full((3,), -1)
    clean = [0, 2]
    for best in (
        gpu.greedy(logits, 0, torch.arange(3), last),
        gpu.best_keys(logits, 0, 2, **SMALL),
    ):
        assert best[:, -1].tolist() == [0, 1, 0]
        expected = reference.best_keys(logits, 0, best.shape[1] - 1)
        assert torch.equal(best[clean], expected[clean])
    assert last[1] == 0 and (last[clean] == logits[clean].argmax(1)).all()


def test_a_row_without_a_possible_token_leaves_token_0() -> None:
    last = torch.full((1,), 9)
    best = gpu.greedy(torch.full((1, 3000), -math.inf), 5, torch.tensor([0]), last)
    assert keys.values_of(best[:, 0]).item() == -math.inf and last.tolist() == [0]


@pytest.mark.parametrize("columns", [0, 31, 1000])
@pytest.mark.parametrize("width", [2, 20, 32])
@pytest.mark.parametrize("kind", KINDS)
def test_best_keys(kind: str, width: int, columns: int) -> None:
    logits = rows_of(kind, 3, columns)
    expected = reference.best_keys(logits, 2**25 + 1, width)
    assert torch.equal(gpu.best_keys(logits, 2**25 + 1, width, **SMALL), expected)


def test_best_keys_of_16_bit_rows_inside_a_larger_tensor() -> None:
    logits = torch.randn(4, 700).half()[1:3, 8:600]
    expected = reference.best_keys(logits, 0, 20)
    assert torch.equal(gpu.best_keys(logits, 0, 20, **SMALL), expected)


def test_log_total() -> None:
    logits = torch.cat([rows_of(kind, 2, 600) for kind in KINDS])
    logits[0] = -math.inf
    rows = torch.tensor([3, 0, 9, 4])
    got, expected = gpu.log_total(logits, rows, lanes=32), reference.log_total(logits, rows)
    torch.testing.assert_close(got, expected, rtol=1e-13, atol=1e-13)
    assert gpu.log_total(logits[:, :0], rows, lanes=32).tolist() == [-math.inf] * 4


@pytest.mark.parametrize("columns", [0, 1, 600, 2500])
def test_penalties_change_their_rows_alone_and_round_as_the_reference(columns: int) -> None:
    logits = rows_of("holes", 5, columns)
    seen = torch.rand(7, columns) < 0.3
    counts = (torch.randint(-6, 4, (7, columns)).clamp(0)).int()
    penalties = Penalties(
        rows=torch.tensor([4, 0, 2]),
        slots=torch.tensor([1, 6, 3]),
        factors=torch.tensor([[1.3, 0.7, 1.0], [0.4, 0.0, -1.1], [0.3, -0.2, 0.0]]),
    )
    got, expected = logits.clone(), logits.clone()
    gpu.penalise(got, seen, counts, penalties)
    reference.penalise(expected, seen, counts, penalties)
    assert bits(got) == bits(expected)
    assert bits(got[[1, 3]]) == bits(logits[[1, 3]])


def params(rows: list[tuple[float, int, float, float, float]]) -> DrawParams:
    columns = [torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True)]
    temperature, top_k, top_p, min_p, uniform = columns
    return DrawParams(
        temperature=temperature, top_k=top_k.long(), top_p=top_p, min_p=min_p, uniform=uniform
    )


FILTERS = st.tuples(
    st.sampled_from([0.8, 1.0, 0.01, 3.0, 1e30, 5e-324, 1e300]),
    st.sampled_from([0, 0, 1, 3, 40, 500]),
    st.sampled_from([1.0, 0.95, 0.5, 0.999, 1e-9]),
    st.sampled_from([0.0, 0.0, 0.1, 1.0]),
    st.sampled_from([0.0, 0.3, 0.77, 0.999, 1 - 2**-53]),
)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(FILTERS, min_size=2, max_size=2),
    st.sampled_from([1, 5, 300, 700]),
    st.sampled_from(KINDS[:4]),
    st.integers(0, 2**32),
)
def test_draws_equal_the_sorted_definition(
    filters: list[tuple[float, int, float, float, float]], columns: int, kind: str, seed: int
) -> None:
    torch.manual_seed(seed)
    logits = rows_of(kind, 3, columns)
    rows = torch.tensor([2, 0])
    top = logits[rows].amax(1)
    given = params(filters)
    got = gpu.draw(logits, rows, top, given, **SMALL)
    assert torch.equal(got, reference.draw(logits, rows, top, given))


def test_words_have_room_for_the_largest_sums() -> None:
    """All logits of a lane or of a list equal to the best one."""
    one = select_kernel._ONE.value
    assert one > MAX_SUM << MASS_BITS
    assert MAX_SUM * one + one < 2**63


def test_rows_without_a_best_are_left_alone() -> None:
    logits = torch.randn(2, 300)
    logits[1, 3] = math.nan
    given = params([(1.0, 0, 0.5, 0.0, 0.5)] * 3)
    top = torch.tensor([float(logits[0].max()), math.nan, math.inf])
    got = gpu.draw(logits, torch.tensor([0, 1, 0]), top, given, **SMALL)
    assert got[1:].tolist() == [0, 0]


def test_wrong_inputs_are_named() -> None:
    logits = torch.zeros(2, 40)
    with pytest.raises(ValueError, match="logits must be"):
        gpu.best_keys(logits.T, 0, 1)
    with pytest.raises(ValueError, match="width must be"):
        gpu.best_keys(logits, 0, 129)
    with pytest.raises(ValueError, match="slots must be"):
        gpu.greedy(logits, 0, torch.arange(3), torch.arange(3))
    with pytest.raises(ValueError, match="at most 65536 columns"):
        gpu.best_keys(torch.zeros(1, 65537), 0, 2, lanes=32)
