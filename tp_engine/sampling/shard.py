"""The part of sampling that every rank does on the logits of its vocabulary shard.

R sampled rows of a step, V tokens of this shard, C candidates a shard and row, F full rows.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tp_engine.plan import IntArray
from tp_engine.sampling import keys
from tp_engine.sampling.slots import SlotRows, SlotStates
from tp_engine.transfer import to_device

__all__ = ["ShardSampler"]


class ShardSampler:
    """Changes logits as requests ask, and packs what rank 0 needs of them."""

    def __init__(self, states: SlotStates) -> None:
        self.states = states

    def process(self, logits: Tensor, rows: SlotRows) -> Tensor:
        """Apply bias, penalties and suppression, in this order, to the rows that have them.

        Args:
            logits: float32 [R, V]; left as it is.
            rows: the R rows.

        Returns:
            float32 [R, V]; ``logits`` itself when no row is changed.
        """
        if not rows.params["modified"].any():
            return logits
        out = logits.clone()
        for row in np.flatnonzero(rows.params["modified"]).tolist():
            if (bias := self.states.bias.get(int(rows.slots[row]))) is not None:
                out[row].index_add_(0, *bias)
        self._penalise(out, rows)
        active = rows.positions < rows.params["suppress_before"]
        for row in np.flatnonzero(rows.params["modified"] & active).tolist():
            if (columns := self.states.suppressed.get(int(rows.slots[row]))) is not None:
                out[row].index_fill_(0, columns, -torch.inf)
        return out

    def _penalise(self, out: Tensor, rows: SlotRows) -> None:
        chosen = np.flatnonzero(rows.params["penalised"])
        if chosen.size == 0:
            return
        device, params = out.device, rows.params[chosen]
        index = to_device(np.stack([chosen, rows.slots[chosen]]), device)
        names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
        numbers = to_device(np.stack([params[name] for name in names]), device)
        repetition, presence, frequency = numbers.unsqueeze(2)  # [n, 1] each
        logits = out[index[0]]  # [n, V]
        counts = self.states.output_counts[index[1]]
        seen = self.states.prompt_seen[index[1]] | (counts > 0)
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(seen, repeated, logits)
        out[index[0]] = logits - presence * (counts > 0) - frequency * counts

    def candidates(self, processed: Tensor, raw: Tensor, rows: SlotRows, width: int) -> Tensor:
        """What rank 0 needs of every row, of equal shape on all ranks.

        Args:
            processed: float32 [R, V], from `process`.
            raw: float32 [R, V], the model's logits.
            rows: the R rows.
            width: C.

        Returns:
            int64 [R, C + 2]: C keys of processed logits (`keys.best`), the bits of the raw logits'
            log-sum-exp in float64 (of rows that report log-probabilities, else -inf), and whether
            the row has a NaN or plus infinity (1) or not (0).
        """
        broken = ~(raw < torch.inf).all(dim=1)  # no comparison holds for NaN
        if processed is not raw:
            broken |= ~(processed < torch.inf).all(dim=1)
        total = raw.new_full((raw.shape[0],), -torch.inf, dtype=torch.float64)
        if (reported := rows.reported()).size:
            index = to_device(reported, raw.device)
            total[index] = raw[index].to(torch.float64).logsumexp(dim=1)
        best = keys.best(processed, self.states.vocab.start, width)
        tail = torch.stack([total.view(torch.int64), broken.to(torch.int64)], dim=1)
        return torch.cat([best, tail], dim=1)

    def full(
        self, processed: Tensor, raw: Tensor, rows: SlotRows, full_rows: IntArray, padded: int
    ) -> Tensor:
        """Whole rows of this shard, of equal shape on all ranks.

        Args:
            processed: float32 [R, V], from `process`.
            raw: float32 [R, V], the model's logits.
            rows: the R rows.
            full_rows: numbers of the F rows, on the host.
            padded: columns of the result, at least V.

        Returns:
            float32 [F + n, padded]: the processed rows, then the raw ones of
            `SlotRows.raw_rows`; minus infinity beyond V.
        """
        index = to_device(full_rows, raw.device)
        raw_index = to_device(rows.raw_rows(full_rows), raw.device)
        whole = torch.cat([processed[index], raw[raw_index]])
        return torch.nn.functional.pad(whole, (0, padded - whole.shape[1]), value=-torch.inf)
