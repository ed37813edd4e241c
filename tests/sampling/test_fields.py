"""Every field of the parameters does what it says, for any cut of the vocabulary."""

from __future__ import annotations

import math

import pytest
import torch

from tests.sampling.world import World, sample
from tp_engine.params import SamplingParams

RANKS = [1, 2, 3, [0, 4, 2]]
LOGITS = torch.tensor([0.0, 2.0, 1.0, 2.0, -1.0, 1.5])
ranks = pytest.mark.parametrize("ranks", RANKS, ids=str)


def greedy(**fields: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, **fields)  # type: ignore[arg-type]  # several types


@ranks
def test_greedy_takes_the_lowest_id_among_equals(ranks: int) -> None:
    assert sample(LOGITS, greedy(), ranks=ranks) == [1]
    assert sample(torch.zeros(6), greedy(), ranks=ranks) == [0]
    assert sample(torch.tensor([-0.0, 0.0, -1, -1, -1, -1]), greedy(), ranks=ranks) == [0]
    assert sample(torch.tensor([-5.0, -4, -3, -2, -1, -1]), greedy(), ranks=ranks) == [4]


@ranks
def test_temperature_flattens(ranks: int) -> None:
    hot = sample(LOGITS, SamplingParams(temperature=100.0), ranks=ranks, draws=300)
    cold = sample(LOGITS, SamplingParams(temperature=0.01), ranks=ranks, draws=300)
    assert set(hot) == set(range(6))
    assert set(cold) == {1, 3}


@ranks
def test_the_smallest_temperature_is_greedy_among_the_best(ranks: int) -> None:
    tiny = SamplingParams(temperature=5e-324)
    assert set(sample(LOGITS, tiny, ranks=ranks, draws=100)) == {1, 3}


@ranks
def test_top_k_keeps_exactly_k_the_lowest_ids_among_equals(ranks: int) -> None:
    for top_k, kept in [(1, {1}), (2, {1, 3}), (3, {1, 3, 5}), (6, set(range(6)))]:
        params = SamplingParams(temperature=5.0, top_k=top_k)
        assert set(sample(LOGITS, params, ranks=ranks, draws=400)) == kept


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("top_k", [127, 128, 129, 200])
def test_top_k_is_exact_on_both_sides_of_the_largest_candidate_count(
    top_k: int, ranks: int
) -> None:
    logits = torch.arange(300.0).neg() / 1000
    drawn = sample(logits, SamplingParams(top_k=top_k), ranks=ranks, draws=3000)
    assert set(drawn) == set(range(top_k))


@ranks
def test_top_p_keeps_the_smallest_set_that_reaches_it(ranks: int) -> None:
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()
    logits = torch.cat([torch.full((2,), -math.inf), logits])
    for top_p, kept in [(1e-9, {2}), (0.49, {2}), (0.51, {2, 3}), (0.8, {2, 3, 4}), (0.9, 4)]:
        got = set(sample(logits, SamplingParams(top_p=top_p), ranks=ranks, draws=300))
        assert got == kept or len(got) == kept


@ranks
def test_top_p_counts_what_top_k_left(ranks: int) -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.05, 0.03, 0.02]).log()
    # Of the three best, 0.4 + 0.3 are 0.78 of the mass; of all they are 0.7.
    params = SamplingParams(top_k=3, top_p=0.75)
    assert set(sample(logits, params, ranks=ranks, draws=300)) == {0, 1}
    params = SamplingParams(top_p=0.75)
    assert set(sample(logits, params, ranks=ranks, draws=300)) == {0, 1, 2}


@ranks
def test_min_p_is_relative_to_the_best(ranks: int) -> None:
    logits = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.03, 0.02]).log()
    for fields in ({}, {"top_k": 5}, {"top_p": 0.99}):
        params = SamplingParams(min_p=0.3, **fields)
        assert set(sample(logits, params, ranks=ranks, draws=300)) == {0, 1, 2}
    assert set(sample(logits, SamplingParams(min_p=1.0), ranks=ranks, draws=50)) == {0}


@ranks
def test_seed_fixes_the_tokens_and_position_changes_them(ranks: int) -> None:
    def tokens(seed: int) -> list[int]:
        world = World(6, ranks)
        world.open(0, SamplingParams(temperature=3.0, seed=seed))
        row = LOGITS[None]
        return [int(world.step(row, [0], [position]).tokens) for position in range(1, 20)]

    assert tokens(7) == tokens(7)
    assert tokens(7) != tokens(8)
    assert len(set(tokens(7))) > 1


@ranks
def test_logit_bias_forces_and_forbids(ranks: int) -> None:
    assert sample(LOGITS, greedy(logit_bias={4: 100.0, 0: 1.0}), ranks=ranks) == [4]
    assert sample(LOGITS, greedy(logit_bias={1: -100.0, 3: -100.0}), ranks=ranks) == [5]
    # Bias comes before the repetition penalty: (1 + 3) / 4 < 2, but 1 / 4 + 3 > 2.
    world = World(6, ranks)
    world.open(0, greedy(logit_bias={2: 3.0}, repetition_penalty=4.0), prompt=[2])
    assert world.step(LOGITS[None], [0], [1]).tokens.tolist() == [1]


@ranks
def test_repetition_penalty_divides_positive_and_multiplies_negative_logits(ranks: int) -> None:
    world = World(6, ranks)
    world.open(0, greedy(repetition_penalty=1.4), prompt=[1, 3])
    assert world.step(LOGITS[None], [0], [2]).tokens.tolist() == [5]
    negative = torch.tensor([-3.0, -1.0, -1.2, -2, -2, -2])
    world.open(1, greedy(repetition_penalty=1.3), prompt=[1])
    assert world.step(negative[None], [1], [2]).tokens.tolist() == [2]
    world.open(2, greedy(repetition_penalty=0.5), prompt=[2])
    assert world.step(LOGITS[None] + 0.5, [2], [2]).tokens.tolist() == [2]


@ranks
def test_repetition_penalty_counts_the_output_and_the_prompt(ranks: int) -> None:
    world = World(6, ranks)
    world.open(0, greedy(repetition_penalty=3.0), prompt=[1])
    got = [world.step(LOGITS[None], [0], [position]).tokens.item() for position in (1, 2, 3)]
    assert got == [3, 5, 2]


@ranks
def test_presence_and_frequency_leave_prompt_tokens_to_the_repetition_penalty(ranks: int) -> None:
    world = World(6, ranks)
    params = greedy(repetition_penalty=1.1, presence_penalty=1.0, frequency_penalty=1.0)
    world.open(0, params, prompt=[1, 3])
    # 2 / 1.1 is still the best; with a penalty of prompt tokens it would be token 5.
    assert world.step(LOGITS[None], [0], [2]).tokens.tolist() == [1]


@ranks
def test_presence_and_frequency_count_the_output_and_not_the_prompt(ranks: int) -> None:
    world = World(6, ranks)
    world.open(0, greedy(presence_penalty=1.1), prompt=[1, 1, 3])
    world.open(1, greedy(frequency_penalty=0.3), prompt=[1, 1, 3])
    got = [
        world.step(LOGITS.expand(2, -1), [0, 1], [position, position]).tokens.tolist()
        for position in range(3, 9)
    ]
    presence, frequency = zip(*got, strict=True)
    assert presence == (1, 3, 5, 2, 1, 1)
    assert frequency == (1, 3, 1, 3, 5, 1)


@ranks
def test_min_tokens_suppresses_ends_for_exactly_that_many_tokens(ranks: int) -> None:
    world = World(6, ranks)
    world.open(0, greedy(min_tokens=2, stop_token_ids=(3,)), prompt=[4, 4], eos_ids=[1])
    got = [world.step(LOGITS[None], [0], [position]).tokens.item() for position in (2, 3, 4)]
    assert got == [5, 5, 1]
    world.open(1, greedy(min_tokens=2, ignore_eos=True), prompt=[4, 4], eos_ids=[1])
    assert world.step(LOGITS[None], [1], [2]).tokens.tolist() == [1]
