"""Sampled frequencies against a float64 reference distribution."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from scipy import stats

from tests.sampling import reference
from tests.sampling.world import World
from tp_engine.params import SamplingParams

LOGITS = torch.tensor([1.3, 0.2, -0.4, 2.0, 1.1, 2.0, -1.0, 0.9, 0.0, 1.7])
PROMPT, OUTPUT, ENDS = [3, 3, 1], [5, 0, 0, 8], [9]
LEAST = 1e-4
"""Chance of a false alarm in one comparison; the numbers are fixed, so it strikes once or never."""


def frequencies(params: SamplingParams, ranks: int, draws: int) -> np.ndarray:
    world = World(LOGITS.numel(), ranks, slots=draws)
    for slot in range(draws):
        world.open(slot, params, seed=slot, prompt=PROMPT, output=OUTPUT, eos_ids=ENDS)
    position = len(PROMPT) + len(OUTPUT)
    logits = LOGITS.expand(draws, -1)
    sampled = world.step(logits, range(draws), [position] * draws)
    return torch.bincount(sampled.tokens, minlength=LOGITS.numel()).numpy()


def expected(params: SamplingParams, suppressed: Sequence[int] = ()) -> np.ndarray:
    row = LOGITS.double().numpy()
    prompt, output = (PROMPT, OUTPUT) if params.penalised else ([], [])
    row = reference.processed(row, params, prompt, output, suppressed)
    return reference.distribution(row, params)


def pvalue(observed: np.ndarray, probabilities: np.ndarray) -> float:
    possible = probabilities > 0
    assert observed[~possible].sum() == 0, "a token was drawn that the filters drop"
    if possible.sum() == 1:
        return 1.0
    scale = observed.sum() / probabilities.sum()
    return float(stats.chisquare(observed[possible], probabilities[possible] * scale).pvalue)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_k": 4},
        {"top_k": 1},
        {"top_k": 1000, "temperature": 1.5},
        {"top_p": 0.6},
        {"top_p": 0.9, "temperature": 2.0},
        {"min_p": 0.2},
        {"top_k": 6, "top_p": 0.8},
        {"top_k": 7, "top_p": 0.9, "min_p": 0.35, "temperature": 1.7},
        {"top_p": 0.95, "min_p": 0.3},
    ],
    ids=str,
)
def test_frequencies_follow_the_filters(fields: dict[str, float], ranks: int) -> None:
    params = SamplingParams(**fields)  # type: ignore[arg-type]  # fields of several types
    assert pvalue(frequencies(params, ranks, 3000), expected(params)) > LEAST


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(
    "fields",
    [
        {"repetition_penalty": 1.8},
        {"presence_penalty": 1.2, "frequency_penalty": -0.4},
        {"logit_bias": {6: 2.5, 3: -1.0}},
        {
            "logit_bias": {1: 1.5, 5: -1.0},
            "repetition_penalty": 0.7,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.3,
            "temperature": 1.4,
            "top_k": 8,
            "top_p": 0.95,
            "min_p": 0.05,
        },
    ],
    ids=["repetition", "presence and frequency", "bias", "all"],
)
def test_frequencies_follow_changed_logits(fields: dict[str, object], ranks: int) -> None:
    params = SamplingParams(**fields)  # type: ignore[arg-type]  # fields of several types
    assert pvalue(frequencies(params, ranks, 1500), expected(params)) > LEAST


def test_frequencies_leave_suppressed_tokens_out() -> None:
    params = SamplingParams(min_tokens=len(OUTPUT) + 1)
    assert pvalue(frequencies(params, 2, 1500), expected(params, ENDS)) > LEAST
    reached = SamplingParams(min_tokens=len(OUTPUT))
    assert pvalue(frequencies(reached, 2, 1500), expected(reached)) > LEAST


@pytest.mark.parametrize(
    ("drawn", "claimed"),
    [({"temperature": 1.2}, {}), ({"repetition_penalty": 1.8}, {"repetition_penalty": 1.5})],
    ids=str,
)
def test_the_comparison_sees_a_wrong_distribution(
    drawn: dict[str, float], claimed: dict[str, float]
) -> None:
    observed = frequencies(SamplingParams(**drawn), 1, 4000)  # type: ignore[arg-type]  # as above
    assert pvalue(observed, expected(SamplingParams(**claimed))) < LEAST  # type: ignore[arg-type]


def test_a_flat_distribution_over_a_large_vocabulary_reaches_every_part_of_it() -> None:
    vocab, draws = 20_000, 300
    world = World(vocab, 3, slots=draws)
    for slot in range(draws):
        world.open(slot, SamplingParams(temperature=1.0), seed=slot)
    tokens = world.step(torch.zeros(1, vocab).expand(draws, -1), range(draws), [1] * draws).tokens
    assert stats.kstest(tokens.numpy() / vocab, "uniform").pvalue > LEAST
