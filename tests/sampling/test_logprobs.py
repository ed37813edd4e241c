from __future__ import annotations

import math

import pytest
import torch

from tests.sampling.world import World
from tp_engine.params import SamplingParams

VOCAB = 90
CASES: list[dict[str, object]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 3.0, "logit_bias": {4: 100.0}},
    {"temperature": 0.0, "min_tokens": 5},
    {"temperature": 1.5},
    {"temperature": 1.5, "top_k": 70, "top_p": 0.9},
    {"temperature": 1.5, "top_k": 1, "min_p": 0.1},
    {"temperature": 1.5, "top_p": 0.7},
    {"temperature": 1.5, "frequency_penalty": 2.0},
    {"temperature": 1.5, "top_k": 3, "logit_bias": {8: -100.0, 9: 5.0}},
]


@pytest.mark.parametrize("ranks", [1, 2, 3, [0, 89, 1]], ids=str)
def test_logprobs_are_log_softmax_of_the_models_own_logits(ranks: int) -> None:
    wanted = [0, 1, 5, 20, 64]
    world = World(VOCAB, ranks, slots=len(CASES) * len(wanted))
    pairs = [(fields, count) for fields in CASES for count in wanted]
    for slot, (fields, count) in enumerate(pairs):
        params = SamplingParams(logprobs=count, **fields)  # type: ignore[arg-type]  # several types
        world.open(slot, params, seed=slot, prompt=[3, 5], output=[7, 7, 9], eos_ids=[2])
    logits = torch.randn(len(pairs), VOCAB, generator=torch.Generator().manual_seed(3)) * 4
    logits[:, 40:50] = logits[:, 30:40]  # ties: alternatives come in the order of their ids
    slots = list(range(len(pairs)))
    result = world.step(logits, slots, [5] * len(pairs))
    truth = logits.double().log_softmax(dim=1)
    values, order = truth.sort(dim=1, descending=True, stable=True)
    for slot, (_, count) in enumerate(pairs):
        report = result.logprobs[slot]
        assert report is not None
        assert report.token == result.tokens[slot]
        assert report.logprob == pytest.approx(truth[slot, report.token].item(), abs=1e-9)
        assert report.top_ids == order[slot, :count].tolist()
        assert report.top_logprobs == pytest.approx(values[slot, :count].tolist(), abs=1e-9)


def test_bias_moves_the_token_and_not_its_logprob() -> None:
    world = World(4, 2)
    world.open(0, SamplingParams(temperature=0.0, logprobs=2, logit_bias={3: 100.0}))
    logits = torch.tensor([[2.0, 1.0, 0.0, -5.0]])
    report = world.step(logits, [0], [1]).logprobs[0]
    assert report is not None and report.token == 3
    assert report.top_ids == [0, 1]
    assert report.logprob == pytest.approx(logits.log_softmax(1)[0, 3].item(), abs=1e-6)


def test_only_rows_that_ask_get_logprobs() -> None:
    world = World(6, 2)
    world.open(0, SamplingParams(temperature=0.0))
    world.open(1, SamplingParams(temperature=0.0, logprobs=0))
    result = world.step(torch.eye(6)[:2] * 3, [0, 1], [1, 1])
    assert result.logprobs[0] is None
    report = result.logprobs[1]
    assert report is not None and (report.top_ids, report.top_logprobs) == ([], [])


@pytest.mark.parametrize("fields", [{"temperature": 0.0}, {"logit_bias": {0: 1.0}}], ids=str)
def test_impossible_alternatives_are_left_out(fields: dict[str, object]) -> None:
    world = World(6, 3)
    world.open(0, SamplingParams(logprobs=20, **fields))  # type: ignore[arg-type]  # several types
    logits = torch.tensor([[1.0, 0.0, 0.5, -math.inf, -math.inf, -math.inf]])
    report = world.step(logits, [0], [1]).logprobs[0]
    assert report is not None and report.top_ids == [0, 2, 1]
    assert len(report.top_logprobs) == 3
