"""One rank's sampler: the flow of one step from logits to recorded tokens.

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

from sharding.units import Span
from tp_engine.messages import TokenLogprobs
from tp_engine.plan import IntArray
from tp_engine.sampling.choose import Choice, choose
from tp_engine.sampling.shard import ShardSampler
from tp_engine.sampling.slots import SlotRows, SlotStates

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
        if choice.tokens.is_cuda:
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

    def __init__(self, states: SlotStates, shards: Sequence[Span], comm: Gatherer) -> None:
        """Bind a rank's slots to its ranks.

        Args:
            states: this rank's slots.
            shards: vocabulary spans of all ranks, in rank order and covering the vocabulary.
            comm: collectives over these ranks.
        """
        assert shards[comm.rank] == states.vocab, "the slots belong to another vocabulary shard"
        self.states = states
        self._shard = ShardSampler(states)
        self._sizes = [span.size for span in shards]
        self._comm = comm

    def step(
        self,
        logits: Tensor,
        slots: IntArray,
        positions: IntArray,
        candidates: int,
        full_rows: IntArray,
    ) -> Sampled | None:
        """Sample and record one token a row.

        Args:
            logits: float32 [R, V] of this rank's vocabulary shard; R and V may be 0.
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
        processed = self._shard.process(logits, rows)
        gathered = self._comm.gather_to_zero(
            self._shard.candidates(processed, logits, rows, candidates)
        )
        whole = None
        if full_rows.size:
            padded = max(self._sizes)
            whole = self._comm.gather_to_zero(
                self._shard.full(processed, logits, rows, full_rows, padded)
            )
        if gathered is None:
            tokens = torch.empty(slots.size, dtype=torch.int64, device=logits.device)
            self.states.record(slots, self._comm.broadcast_from_zero(tokens))
            return None
        choice = choose(gathered, whole, rows, full_rows, self._sizes)
        tokens = self._comm.broadcast_from_zero(choice.tokens)
        self.states.record(slots, tokens)
        return Sampled(choice, rows)

    def _nothing(self, rows: SlotRows) -> Sampled | None:
        if self._comm.rank != 0:
            return None
        tokens = torch.empty(0, dtype=torch.int64)
        choice = Choice(tokens=tokens, failed=tokens.bool(), logprobs=None, alternatives=None)
        return Sampled(choice, rows)
