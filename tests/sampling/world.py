"""Ranks simulated in one process: a thread each, and collectives that check their shapes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from kernels.dispatch import ops_for
from sharding.units import Span
from tp_engine.params import SamplingParams
from tp_engine.sampling import Sampled, Sampler, SlotStates, sampling_needs, slot_init

TIMEOUT = 20.0
CPU = torch.device("cpu")


@dataclass
class Meeting:
    """What the ranks of one world share."""

    world: int
    parts: dict[int, Tensor] = field(default_factory=dict)
    gathers: int = 0

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.world, timeout=TIMEOUT)


@dataclass
class FakeComm:
    rank: int
    meeting: Meeting

    def gather_to_zero(self, x: Tensor) -> list[Tensor] | None:
        self.meeting.parts[self.rank] = x.clone()
        self.meeting.barrier.wait()
        parts = [self.meeting.parts[rank] for rank in range(self.meeting.world)]
        assert len({(part.shape, part.dtype) for part in parts}) == 1
        self.meeting.barrier.wait()
        if self.rank != 0:
            return None
        self.meeting.gathers += 1
        return parts

    def broadcast_from_zero(self, x: Tensor) -> Tensor:
        self.meeting.parts[self.rank] = x
        self.meeting.barrier.wait()
        root = self.meeting.parts[0].clone()
        assert root.shape == x.shape and root.dtype == x.dtype
        self.meeting.barrier.wait()
        return x.copy_(root)


class World:
    """Samplers of all ranks over one vocabulary."""

    def __init__(
        self,
        vocab: int,
        ranks: int | Sequence[int],
        *,
        slots: int = 16,
        start: int = 0,
        device: torch.device = CPU,
    ) -> None:
        if isinstance(ranks, int):
            ranks = [vocab // ranks + (rank < vocab % ranks) for rank in range(ranks)]
        assert sum(ranks) == vocab
        stops = np.cumsum(ranks).tolist()
        self.start = start
        self.shards = [
            Span(start + stop - size, start + stop) for stop, size in zip(stops, ranks, strict=True)
        ]
        self.meeting = Meeting(len(ranks))
        self.states = [SlotStates(slots, span, device) for span in self.shards]
        self.samplers = [
            Sampler(states, self.shards, FakeComm(rank, self.meeting), ops_for(device))
            for rank, states in enumerate(self.states)
        ]
        self.params: dict[int, SamplingParams] = {}

    def open(
        self,
        slot: int,
        params: SamplingParams,
        *,
        seed: int = 0,
        prompt: Sequence[int] = (0,),
        output: Sequence[int] = (),
        eos_ids: Sequence[int] = (),
    ) -> None:
        init = slot_init(
            slot,
            params,
            seed=params.seed if params.seed is not None else seed,
            prompt=prompt,
            output=output,
            eos_ids=eos_ids,
            prompt_len=len(prompt),
        )
        self.params[slot] = params
        for states in self.states:
            states.open(init)

    def step(self, logits: Tensor, slots: Sequence[int], positions: Sequence[int]) -> Sampled:
        """Sample whole rows float32 [R, V]; checks that all ranks recorded the same tokens."""
        candidates, full = sampling_needs([self.params[slot] for slot in slots])
        before = logits.clone()
        results: dict[int, Sampled | None] = {}
        errors: list[BaseException] = []

        def work(rank: int) -> None:
            span = self.shards[rank]
            part = logits[:, span.start - self.start : span.stop - self.start]
            places = torch.tensor(list(slots), dtype=torch.int64, device=logits.device)
            try:
                results[rank] = self.samplers[rank].step(
                    self.samplers[rank].greedy(part, places),
                    np.array(slots, np.int64),
                    np.array(positions, np.int64),
                    candidates,
                    np.array(full, np.int64),
                )
            except BaseException as error:
                errors.append(error)
                self.meeting.barrier.abort()

        if self.meeting.world == 1:
            work(0)
        else:
            threads = [
                threading.Thread(target=partial(work, rank)) for rank in range(len(self.shards))
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if errors:
            raise errors[0]
        assert torch.equal(logits.nan_to_num(7.5), before.nan_to_num(7.5)), "logits were changed"
        assert all(results[rank] is None for rank in range(1, len(self.shards)))
        sampled = results[0]
        assert sampled is not None
        index = torch.tensor(list(slots), dtype=torch.int64)
        for states in self.states:
            assert torch.equal(states.last_token.cpu()[index], sampled.tokens.cpu())
        return sampled


def sample(
    logits: Tensor, params: SamplingParams, *, ranks: int | Sequence[int] = 1, draws: int = 1
) -> list[int]:
    """``draws`` tokens of one row of logits [V], with independent seeds in as many slots."""
    world = World(logits.shape[0], ranks, slots=draws)
    for slot in range(draws):
        world.open(slot, params, seed=slot)
    tokens: list[int] = world.step(
        logits.expand(draws, -1), range(draws), [1] * draws
    ).tokens.tolist()
    return tokens
