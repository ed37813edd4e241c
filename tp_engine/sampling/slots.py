"""What each rank keeps between steps of every running request, to sample for it.

S slots, V tokens of this rank's vocabulary shard. Numbers that steer the host's choices stay on
the host; what grows with V or is known only after sampling lives with the logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sharding.units import Span
from tp_engine.steps.plan import IntArray, SlotInit
from tp_engine.steps.transfer import to_device

__all__ = ["SlotRows", "SlotStates"]

_TABLE = np.dtype(
    [
        ("temperature", np.float64),
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("repetition_penalty", np.float32),
        ("presence_penalty", np.float32),
        ("frequency_penalty", np.float32),
        ("top_k", np.int64),
        ("seed", np.int64),
        ("logprobs", np.int64),
        ("suppress_before", np.int64),
        ("penalised", np.bool_),
        ("modified", np.bool_),
    ]
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotRows:
    """The R sampled rows of a step, as the host knows them."""

    slots: IntArray
    """Slot of each row [R]; no slot twice."""
    positions: IntArray
    """Position in its sequence of the token that each row samples [R]."""
    params: npt.NDArray[np.void]
    """Rows of `SlotStates.table` [R]."""

    def greedy(self) -> bool:
        """Whether every row takes the best of its unchanged logits, and nothing is reported."""
        params = self.params
        asked = (params["temperature"] > 0) | params["modified"] | (params["logprobs"] >= 0)
        return not asked.any()

    def reported(self) -> IntArray:
        """Rows that want log-probabilities, ascending."""
        return np.flatnonzero(self.params["logprobs"] >= 0)

    def raw_rows(self, full_rows: IntArray) -> IntArray:
        """Of ``full_rows``, those whose unmodified logits rank 0 needs as well."""
        params = self.params[full_rows]
        rows: IntArray = full_rows[params["modified"] & (params["logprobs"] >= 0)]
        return rows


class SlotStates:
    """Sampling state of all slots on one rank.

    Memory on the device: 5 bytes a slot and token of the shard, allocated at once so that it is
    counted before the rest of the memory is given away (256 slots of 128,256 tokens: 164 MB over
    all ranks together).
    """

    def __init__(self, num_slots: int, vocab: Span, device: torch.device) -> None:
        self.vocab = vocab
        """Token ids of this rank's shard."""
        self.device = device
        self.table = np.zeros(num_slots, _TABLE)
        """Host parameters by slot [S]; ``modified``: logits may be changed before choosing."""
        self.last_token = torch.full((num_slots,), -1, dtype=torch.int64, device=device)
        """Token sampled last [S]; -1 before the first."""
        self.prompt_seen = torch.zeros((num_slots, vocab.size), dtype=torch.bool, device=device)
        """Tokens of the prompt [S, V]; filled for penalised slots only."""
        self.output_counts = torch.zeros((num_slots, vocab.size), dtype=torch.int32, device=device)
        """Occurrences in the output [S, V]; filled for penalised slots only."""
        self.bias: dict[int, tuple[Tensor, Tensor]] = {}
        """By slot with a bias: columns int64 [n] and what is added float32 [n]."""
        self.suppressed: dict[int, Tensor] = {}
        """By slot with ``min_tokens``: columns int64 [n]."""

    def open(self, init: SlotInit) -> None:
        """Begin a request in its slot; nothing of the slot's previous request is left."""
        slot = init.slot
        self._forget(slot)
        penalties = (init.repetition_penalty, init.presence_penalty, init.frequency_penalty)
        penalised = penalties != (1.0, 0.0, 0.0)
        row = self.table[slot : slot + 1]
        for name in _TABLE.names or ():
            if name not in ("penalised", "modified"):
                row[name] = getattr(init, name)
        row["penalised"] = penalised
        row["modified"] = penalised or bool(init.bias_ids) or bool(init.suppressed)
        if init.bias_ids:
            columns, owned = self._columns(init.bias_ids)
            values = torch.tensor(init.bias_values, dtype=torch.float32)[owned]
            self.bias[slot] = columns, values.to(self.device)
        if init.suppressed:
            self.suppressed[slot] = self._columns(init.suppressed)[0]
        if penalised:
            self.prompt_seen[slot, self._columns(init.prompt)[0]] = True
            self._count(torch.tensor(init.output, dtype=torch.int64), slot)

    def _forget(self, slot: int) -> None:
        if self.table[slot]["penalised"]:  # the vocabulary-wide rows of others are never written
            self.prompt_seen[slot] = False
            self.output_counts[slot] = 0
        self.last_token[slot] = -1
        self.bias.pop(slot, None)
        self.suppressed.pop(slot, None)

    def _columns(self, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Columns of the ids that lie in this shard (device), and which ones do (host)."""
        tokens = torch.tensor(ids, dtype=torch.int64)
        owned = (tokens >= self.vocab.start) & (tokens < self.vocab.stop)
        return (tokens[owned] - self.vocab.start).to(self.device), owned

    def rows(self, slots: IntArray, positions: IntArray) -> SlotRows:
        """A step's sampled rows."""
        return SlotRows(slots=slots, positions=positions, params=self.table[slots])

    def record(self, slots: IntArray, places: Tensor, tokens: Tensor) -> None:
        """Note what was sampled.

        Args:
            slots: int64 [R], no slot twice.
            places: the same on the device.
            tokens: int64 [R] on the device.
        """
        self.last_token[places] = tokens
        rows = np.flatnonzero(self.table["penalised"][slots])
        if rows.size:
            index = to_device(np.stack([rows, slots[rows]]), self.device)
            self._count(tokens[index[0]], index[1])

    def _count(self, tokens: Tensor, slots: int | Tensor) -> None:
        """Count tokens into their slots' rows; without a look at device values on the host."""
        if self.vocab.size == 0:
            return
        columns = tokens.to(self.device) - self.vocab.start
        owned = (columns >= 0) & (columns < self.vocab.size)
        cells = columns.clamp(0, self.vocab.size - 1) + slots * self.vocab.size
        self.output_counts.view(-1).index_add_(0, cells, owned.to(torch.int32))
