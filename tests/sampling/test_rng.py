from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from tp_engine.sampling.rng import GAMMA, mix, uniform

MASK = 2**64 - 1
int64 = st.integers(-(2**63), 2**63 - 1)


def python_mix(word: int) -> int:
    word &= MASK
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & MASK
    return word ^ (word >> 31)


def test_mix_gives_the_published_numbers_of_splitmix64() -> None:
    states = torch.tensor([1234567], dtype=torch.int64) + GAMMA * torch.arange(1, 4)
    words = [word & MASK for word in mix(states).tolist()]
    assert words == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@settings(deadline=None)
@given(int64, st.integers(0, 2**40))
def test_uniform_equals_exact_integer_arithmetic(seed: int, position: int) -> None:
    word = python_mix(python_mix(seed + GAMMA) + position * GAMMA)
    number = uniform(torch.tensor([seed]), torch.tensor([position])).item()
    assert number == (word >> 11) / 2**53
    assert 0 <= number < 1


def test_a_number_does_not_depend_on_the_ones_beside_it() -> None:
    seeds = torch.arange(-500, 500)
    positions = torch.arange(1000) * 7
    together = uniform(seeds, positions)
    alone = [uniform(seeds[i : i + 1], positions[i : i + 1]).item() for i in range(0, 1000, 37)]
    assert together[::37].tolist() == alone


@pytest.mark.parametrize("along", ["positions", "seeds"])
def test_numbers_are_uniform_and_their_neighbours_unrelated(along: str) -> None:
    count = torch.arange(200_000)
    zeros = torch.zeros_like(count)
    numbers = uniform(zeros, count) if along == "positions" else uniform(count, zeros)
    pairs = torch.stack([numbers[:-1], numbers[1:]])
    cells = (pairs * 20).long()
    observed = torch.bincount(cells[0] * 20 + cells[1], minlength=400)
    assert stats.chisquare(observed.numpy()).pvalue > 1e-4
    assert stats.kstest(numbers.numpy(), "uniform").pvalue > 1e-4
    assert len(set(numbers.tolist())) == numbers.numel()
