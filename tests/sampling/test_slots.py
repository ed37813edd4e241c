from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sharding.units import Span
from tests.sampling.world import CPU, World
from tp_engine.params import SamplingParams
from tp_engine.sampling import SlotStates, slot_init

VOCAB = 12
BUSY = SamplingParams(
    temperature=0.7,
    top_k=5,
    top_p=0.5,
    min_p=0.1,
    seed=99,
    repetition_penalty=1.9,
    presence_penalty=1.0,
    frequency_penalty=1.0,
    logit_bias=dict.fromkeys(range(0, VOCAB, 2), -50.0),
    min_tokens=1000,
    stop_token_ids=(1, 3, 5),
    logprobs=3,
)
PENALISED = SamplingParams(temperature=0.0, repetition_penalty=1.5, frequency_penalty=0.2)


def logits(steps: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(steps, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def generate(world: World, slot: int, start: int, rows: torch.Tensor) -> list[int]:
    return [
        int(world.step(row[None], [slot], [start + step]).tokens) for step, row in enumerate(rows)
    ]


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=2.0, seed=1),
        SamplingParams(temperature=2.0, seed=1, repetition_penalty=1.5),
        SamplingParams(temperature=2.0, seed=1, logit_bias={2: 1.0}, min_tokens=2),
    ],
    ids=["greedy", "drawn", "penalised", "biased"],
)
def test_a_reused_slot_keeps_nothing_of_its_previous_request(
    params: SamplingParams, ranks: int
) -> None:
    rows = logits(12)
    used, fresh = World(VOCAB, ranks), World(VOCAB, ranks)
    used.open(4, BUSY, prompt=[1, 2, 3, 4], output=[5, 5, 6], eos_ids=[7, 8])
    generate(used, 4, 7, rows)
    for world in (used, fresh):
        world.open(4, params, prompt=[9], eos_ids=[2])
    for old, new in zip(used.states, fresh.states, strict=True):
        assert old.table[4] == new.table[4]
        assert torch.equal(old.last_token, new.last_token)
        assert torch.equal(old.prompt_seen, new.prompt_seen)
        assert torch.equal(old.output_counts, new.output_counts)
        assert old.bias.keys() == new.bias.keys()
        assert old.suppressed.keys() == new.suppressed.keys()
    assert generate(used, 4, 1, rows) == generate(fresh, 4, 1, rows)


def test_a_busy_slot_does_not_touch_its_neighbours() -> None:
    rows = logits(10)
    alone, beside = World(VOCAB, 2), World(VOCAB, 2)
    for world in (alone, beside):
        world.open(1, PENALISED, prompt=[3])
    beside.open(0, BUSY, prompt=[1, 2])
    beside.open(2, BUSY, prompt=[1, 2])
    expected = generate(alone, 1, 1, rows)
    got = []
    for step, row in enumerate(rows):
        result = beside.step(row.expand(3, -1), [2, 1, 0], [2 + step, 1 + step, 2 + step])
        got.append(int(result.tokens[1]))
    assert got == expected


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize("cut", [1, 4, 9])
def test_a_preempted_request_goes_on_as_if_nothing_had_happened(
    ranks: int, temperature: float, cut: int
) -> None:
    params = SamplingParams(
        temperature=temperature,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.4,
        min_tokens=6,
        stop_token_ids=(1,),
    )
    rows, prompt = logits(10, seed=cut), [2, 4, 4]
    steady, broken = World(VOCAB, ranks), World(VOCAB, ranks)
    steady.open(0, params, seed=5, prompt=prompt)
    expected = generate(steady, 0, 3, rows)
    broken.open(0, params, seed=5, prompt=prompt)
    before = generate(broken, 0, 3, rows[:cut])
    broken.open(0, BUSY, prompt=[6])
    broken.open(7, params, seed=5, prompt=prompt, output=before)
    assert before + generate(broken, 7, 3 + cut, rows[cut:]) == expected
    for one, other in zip(steady.states, broken.states, strict=True):
        assert torch.equal(one.output_counts[0], other.output_counts[7])
        assert torch.equal(one.prompt_seen[0], other.prompt_seen[7])


def test_the_order_of_penalised_and_other_requests_in_a_step_is_kept() -> None:
    world = World(VOCAB, 2)
    world.open(0, SamplingParams(temperature=0.0))
    world.open(1, PENALISED)
    tokens = world.step(torch.eye(VOCAB)[[7, 11]] * 5, [1, 0], [1, 1]).tokens
    assert tokens.tolist() == [7, 11]
    counts = torch.cat([states.output_counts for states in world.states], dim=1)
    assert counts.nonzero().tolist() == [[1, 7]]


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(0, VOCAB - 1), max_size=20),
    st.lists(st.integers(0, VOCAB - 1), max_size=20),
    st.integers(0, VOCAB),
)
def test_shards_count_what_the_whole_vocabulary_counts(
    output: list[int], recorded: list[int], cut: int
) -> None:
    shards = [Span(0, VOCAB), Span(0, cut), Span(cut, VOCAB)]
    states = [SlotStates(3, span, CPU) for span in shards]
    init = slot_init(
        2, PENALISED, seed=0, prompt=output[:3], output=output, eos_ids=(), prompt_len=3
    )
    for state in states:
        state.open(init)
        for token in recorded:
            state.record(np.array([2]), torch.tensor([2]), torch.tensor([token]))
    whole, low, high = states
    expected = torch.bincount(torch.tensor(output + recorded, dtype=torch.int64), minlength=VOCAB)
    assert torch.equal(whole.output_counts[2].long(), expected)
    for name in ("output_counts", "prompt_seen"):
        parts = [getattr(low, name), getattr(high, name)]
        assert torch.equal(torch.cat(parts, dim=1), getattr(whole, name))
    assert whole.output_counts[:2].sum() == 0


def test_read_only_plan_arrays_are_accepted() -> None:
    states = SlotStates(4, Span(0, VOCAB), CPU)
    slots = np.frombuffer(np.array([3, 1], np.int64).tobytes(), np.int64)
    states.record(slots, torch.tensor([3, 1]), torch.tensor([5, 6]))
    assert states.last_token.tolist() == [-1, 6, -1, 5]
