"""A row's token depends on its own logits, parameters, seed and position, and on nothing else."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sampling import reference
from tests.sampling.world import World
from tp_engine.params import SamplingParams

VOCAB = 300
MIXED = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.9),
    SamplingParams(temperature=1.1, top_k=40),
    SamplingParams(temperature=1.1, top_k=128, top_p=0.9),
    SamplingParams(temperature=1.1, top_k=200, top_p=0.9),
    SamplingParams(temperature=1.3, top_p=0.8, min_p=0.01),
    SamplingParams(temperature=1.0, min_p=0.05, logprobs=7),
    SamplingParams(temperature=0.8, repetition_penalty=1.3, presence_penalty=0.5, logprobs=2),
    SamplingParams(temperature=0.0, frequency_penalty=1.0, logprobs=0),
    SamplingParams(temperature=2.0, top_k=3, logit_bias={7: 4.0, 299: 5.0}),
    SamplingParams(temperature=1.5, min_tokens=10, stop_token_ids=tuple(range(150))),
]


def logits(rows: int, seed: int) -> torch.Tensor:
    values = torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    return (values * 4).round() / 4  # many ties


def run(ranks: Any, batches: list[list[int]], steps: int = 6) -> dict[int, list[int]]:
    """Tokens by request when each step runs the given batches one after the other."""
    world = World(VOCAB, ranks)
    for slot, params in enumerate(MIXED):
        world.open(slot, params, seed=slot * 31, prompt=[slot, 5], output=[9], eos_ids=[0])
    tokens: dict[int, list[int]] = {slot: [] for batch in batches for slot in batch}
    for step in range(steps):
        rows = logits(len(MIXED), step)
        for batch in batches:
            result = world.step(rows[batch], batch, [3 + step] * len(batch))
            assert not result.failed.any()
            for slot, token in zip(batch, result.tokens.tolist(), strict=True):
                tokens[slot].append(token)
    return tokens


TOGETHER = [list(range(len(MIXED)))]


@pytest.mark.parametrize("ranks", [2, 3, 7, [0, 300], [299, 0, 1], [3, 290, 0, 7]], ids=str)
def test_tokens_do_not_depend_on_the_cut_of_the_vocabulary(ranks: Any) -> None:
    assert run(ranks, TOGETHER) == run(1, TOGETHER)


@pytest.mark.parametrize("ranks", [1, 3])
def test_tokens_do_not_depend_on_the_batch(ranks: int) -> None:
    expected = run(ranks, TOGETHER)
    assert run(ranks, [[slot] for slot in range(len(MIXED))]) == expected
    assert run(ranks, [[10, 0, 4], [9, 1, 3, 2], [8, 7, 6, 5]]) == expected


def test_logprobs_do_not_depend_on_the_cut_of_the_vocabulary() -> None:
    reports = []
    for ranks in (1, 2, 5):
        world = World(VOCAB, ranks)
        world.open(0, MIXED[6], seed=3)
        reports.append(world.step(logits(1, 0), [0], [1]).logprobs[0])
    first = reports[0]
    assert first is not None
    for other in reports[1:]:
        assert other is not None
        assert (other.token, other.top_ids) == (first.token, first.top_ids)
        assert other.top_logprobs == pytest.approx(first.top_logprobs, abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(-12, 12), min_size=1, max_size=24),
    st.sampled_from([0.3, 1.0, 4.0]),
    st.integers(-1, 30),
    st.sampled_from([0.05, 0.37, 0.83, 1.0]),
    st.sampled_from([0.0, 0.013, 0.4]),
    st.integers(0, 2**62),
    st.data(),
)
def test_a_drawn_token_is_one_that_the_reference_can_draw(
    values: list[int],
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int,
    data: st.DataObject,
) -> None:
    cut = data.draw(st.integers(0, len(values)))
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    row = np.array(values) / 3
    possible = reference.distribution(row.astype(np.float32), params) > 0
    world = World(len(values), [cut, len(values) - cut])
    world.open(0, params, seed=seed)
    token = world.step(torch.tensor(row, dtype=torch.float32)[None], [0], [1]).tokens.item()
    assert possible[int(token)]


def test_ids_beyond_what_float32_holds_are_exact() -> None:
    start = 2**24 + 1  # the first integer that float32 rounds
    world = World(6, 3, start=start)
    # Whole rows begin at token 0, so these are parameters that candidates are enough for.
    world.open(0, SamplingParams(temperature=0.0, logprobs=3))
    world.open(1, SamplingParams(temperature=0.5, top_k=1, logprobs=2))
    world.open(2, SamplingParams(temperature=0.0, logit_bias={start + 4: 90.0}))
    world.open(3, SamplingParams(temperature=0.0, repetition_penalty=5.0), prompt=[start + 2])
    row = torch.tensor([1.0, 0.0, 3.0, 0.0, 0.0, 2.0])
    result = world.step(row.expand(4, -1), [0, 1, 2, 3], [1, 1, 1, 1])
    assert result.tokens.tolist() == [start + 2, start + 2, start + 4, start + 5]
    report = result.logprobs[0]
    assert report is not None and report.top_ids == [start + 2, start + 5, start]
    counted = [
        int(column) + states.vocab.start
        for states in world.states
        for column in states.output_counts[3].nonzero()
    ]
    assert counted == [start + 5]


def test_a_step_without_rows_needs_no_collective() -> None:
    world = World(VOCAB, 3)
    result = world.step(torch.empty(0, VOCAB), [], [])
    assert (result.tokens.shape, result.failed.shape, result.logprobs) == ((0,), (0,), [])
    assert world.meeting.gathers == 0


def test_whole_rows_are_gathered_only_when_a_row_needs_them() -> None:
    world = World(VOCAB, 2)
    world.open(0, SamplingParams(temperature=0.0, repetition_penalty=2.0))
    world.open(1, SamplingParams(temperature=1.0, top_k=50, top_p=0.5, logprobs=5))
    world.open(2, SamplingParams(temperature=1.0))
    world.step(logits(2, 0), [0, 1], [1, 1])
    assert world.meeting.gathers == 1
    world.step(logits(3, 0), [0, 1, 2], [2, 2, 1])
    assert world.meeting.gathers == 3


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["one token", "all tokens"])
@pytest.mark.parametrize("victim", [0, 1, 3, 5, 7, 9])
def test_a_broken_row_fails_alone(broken: float, where: str, victim: int) -> None:
    rows = logits(len(MIXED), 1)
    slots = list(range(len(MIXED)))
    hurt = rows.clone()
    hurt[victim, 211 if where == "one token" else slice(None)] = broken
    results = []
    for values in (rows, hurt):
        world = World(VOCAB, 3)
        for slot, params in enumerate(MIXED):
            world.open(slot, params, seed=slot, prompt=[211, 2])
        results.append(world.step(values, slots, [2] * len(slots)))
    good, bad = results
    fails = broken != -math.inf or where == "all tokens"
    assert bad.failed.tolist() == [fails and row == victim for row in slots]
    others = [row for row in slots if row != victim]
    assert bad.tokens[others].tolist() == good.tokens[others].tolist()
    assert [bad.logprobs[row] for row in others] == [good.logprobs[row] for row in others]
    if fails:
        assert bad.tokens[victim] == 0
        assert bad.logprobs[victim] is None


def test_a_row_whose_every_token_is_suppressed_or_overflows_fails_alone() -> None:
    world = World(6, 2)
    world.open(0, SamplingParams(min_tokens=3, stop_token_ids=tuple(range(6))))
    world.open(1, SamplingParams(temperature=0.0))
    world.open(2, SamplingParams(temperature=0.0, repetition_penalty=1e-300), prompt=[4])
    row = torch.tensor([0.5, 1.0, 3.0, 2.0, 1.0, 0.0])
    result = world.step(row.expand(3, -1), [0, 1, 2], [1, 1, 1])
    assert result.failed.tolist() == [True, False, True]
    assert result.tokens.tolist() == [0, 2, 0]


@pytest.mark.gpu
def test_a_gpu_samples_the_tokens_that_a_cpu_samples() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    got = []
    for device in (torch.device("cpu"), torch.device("cuda")):
        world = World(VOCAB, 1, device=device)
        for slot, params in enumerate(MIXED):
            world.open(slot, params, seed=slot * 31, prompt=[slot, 5], output=[9], eos_ids=[0])
        slots = list(range(len(MIXED)))
        rows = [logits(len(MIXED), step).to(device) for step in range(20)]
        got.append([world.step(row, slots, [3 + i] * len(slots)) for i, row in enumerate(rows)])
    for host, gpu in zip(*got, strict=True):
        assert host.tokens.tolist() == gpu.tokens.tolist()
