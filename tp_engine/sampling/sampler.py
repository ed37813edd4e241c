"""One rank's sampler: the flow of one step from logits to recorded tokens.

all ranks   the best token of the shard's logits (in a captured step)
one rank    if nobody asks for more, that is the token; else
all ranks   bias, penalties, suppression on the shard's logits
all ranks   best candidates of every row, gathered on rank 0; whole rows only where needed
rank 0      choose
all ranks   receive the tokens, record them by slot
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from kernels.dispatch import Ops
from sharding.units import Span
from tp_engine.messages import TokenLogprobs
from tp_engine.sampling.choice import Choice
from tp_engine.sampling.choose import Whole, choose
from tp_engine.sampling.shard import Processed, ShardSampler
from tp_engine.sampling.slots import SlotRows, SlotStates
from tp_engine.steps.plan import IntArray
from tp_engine.steps.step import StepLogits

__all__ = ["Gatherer", "Sampled", "Sampler"]


class Gatherer(Protocol):
    """The two collectives that sampling needs."""

    @property
    def rank(self) -> int:
        """This process's number."""

    def gather_to_zero(self, x: Tensor) -> list[Tensor] | None:
        """``x`` of every rank in rank order on rank 0, None elsewhere; shapes are equal."""

    def broadcast_from_zero(self, x: Tensor) -> Tensor:
        """Overwrite ``x`` with rank 0's and return it."""


class Sampled:
    """A step's result on rank 0, in the order of its sampled rows.

    On a GPU the step may still run: copies to the host are under way, and reading a result waits
    for them alone, not for what was launched after them.
    """

    def __init__(self, choice: Choice, rows: SlotRows) -> None:
        self._rows = rows
        self._choice = choice.to_host()
        self._copied: torch.cuda.Event | None = None
        if choice.picked.is_cuda:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # of torch
            self._copied.record()

    def _wait(self) -> Choice:
        if self._copied is not None:
            self._copied.synchronize()
        return self._choice

    @property
    def tokens(self) -> Tensor:
        """int64 [R] on the host; 0 where ``failed``."""
        return self._wait().tokens

    @property
    def failed(self) -> Tensor:
        """bool [R] on the host: no token could be chosen, because the row's logits hold NaN or plus
        infinity or all tokens are ruled out. The request must be ended; other rows are not
        touched."""
        return self._wait().failed

    @property
    def logprobs(self) -> list[TokenLogprobs | None]:
        """One a row; None where not asked for or failed."""
        return self._wait().report(self._rows)


class Sampler:
    """Samples the rows of a step; called on all ranks with the same rows, slots and needs."""

    def __init__(
        self, states: SlotStates, shards: Sequence[Span], comm: Gatherer, ops: Ops
    ) -> None:
        """Bind a rank's slots to its ranks.

        Args:
            states: this rank's slots.
            shards: vocabulary spans of all ranks, in rank order and covering the vocabulary.
            comm: collectives over these ranks.
            ops: kernels of the slots' device.
        """
        assert shards[comm.rank] == states.vocab, "the slots belong to another vocabulary shard"
        self.states = states
        self._shard = ShardSampler(states, ops)
        self._sizes = [span.size for span in shards]
        self._comm = comm
        self._ops = ops

    def greedy(self, logits: Tensor, slots: Tensor) -> StepLogits:
        """What a step begins with, greedy or not; on the device alone, so a graph may hold it.

        Args:
            logits: [R, V] of this rank's vocabulary shard; R and V may be 0.
            slots: int64 [R] on the device. Their last token becomes the best of this shard; `step`
                corrects it where another one is chosen.
        """
        states = self.states
        best = self._ops.greedy(logits, states.vocab.start, slots, states.last_token)
        return StepLogits(logits=logits, best=best, slots=slots)

    def step(
        self,
        step: StepLogits,
        slots: IntArray,
        positions: IntArray,
        candidates: int,
        full_rows: IntArray,
    ) -> Sampled | None:
        """Sample and record one token a row.

        Args:
            step: from `greedy`, just before.
            slots: slot of each row [R], on the host; no slot twice.
            positions: position of the token to sample [R], on the host: the length of the row's
                sequence before it.
            candidates: `StepPlan.candidates`.
            full_rows: `StepPlan.full_rows`, ascending.

        Returns:
            The result on rank 0, None on the others.
        """
        rows = self.states.rows(slots, positions)
        if slots.size == 0:  # no collective: every rank sees this in the plan
            return self._nothing(rows)
        if len(self._sizes) == 1 and rows.greedy():
            return Sampled(Choice(picked=step.best, logprobs=None, alternatives=None), rows)
        processed = self._shard.process(step.logits, rows)
        gathered = self._comm.gather_to_zero(
            self._shard.candidates(processed, step.best, rows, candidates)
        )
        whole = self._whole(processed, rows, full_rows) if full_rows.size else None
        if gathered is None:
            tokens = torch.empty(slots.size, dtype=torch.int64, device=step.logits.device)
            self.states.record(slots, step.slots, self._comm.broadcast_from_zero(tokens))
            return None
        choice = choose(gathered, whole, rows, full_rows, self._ops)
        tokens = self._comm.broadcast_from_zero(choice.tokens)
        self.states.record(slots, step.slots, tokens)
        return Sampled(choice, rows)

    def _whole(self, processed: Processed, rows: SlotRows, full_rows: IntArray) -> Whole | None:
        if len(self._sizes) == 1:  # they are here
            raw = [(processed.raw, full_rows, full_rows)]
            return Whole(processed=processed.pieces(full_rows), raw=raw)
        padded = max(self._sizes)
        parts = self._comm.gather_to_zero(self._shard.full(processed, rows, full_rows, padded))
        if parts is None:
            return None
        return Whole.joined(parts, self._sizes, full_rows, rows.raw_rows(full_rows))

    def _nothing(self, rows: SlotRows) -> Sampled | None:
        if self._comm.rank != 0:
            return None
        picked = torch.empty((0, 2), dtype=torch.int64)
        return Sampled(Choice(picked=picked, logprobs=None, alternatives=None), rows)
