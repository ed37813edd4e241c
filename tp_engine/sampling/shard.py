"""The part of sampling that every rank does on the logits of its vocabulary shard.

R sampled rows of a step, V tokens of this shard, C candidates a shard and row, F full rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.dispatch import Ops
from kernels.sampling import Penalties
from tp_engine.sampling.slots import SlotRows, SlotStates
from tp_engine.steps.plan import IntArray
from tp_engine.steps.transfer import to_device

__all__ = ["Processed", "ShardSampler"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Processed:
    """The logits of a shard, and beside them those of the rows that requests have changed."""

    raw: Tensor
    """[R, V], the model's logits."""
    changed: IntArray
    """int64 [n], numbers of the changed rows, ascending; on the host."""
    values: Tensor
    """float32 [n, V], their changed logits; ``raw`` without any."""

    def pieces(self, rows: IntArray) -> list[tuple[Tensor, IntArray, IntArray]]:
        """Where some rows' changed logits are: tensor, numbers of rows, places in the tensor."""
        inside = np.isin(rows, self.changed)
        own, other = rows[inside], rows[~inside]
        pieces = [(self.values, own, np.searchsorted(self.changed, own)), (self.raw, other, other)]
        return [piece for piece in pieces if piece[1].size]


class ShardSampler:
    """Changes logits as requests ask, and packs what rank 0 needs of them."""

    def __init__(self, states: SlotStates, ops: Ops) -> None:
        self.states = states
        self._ops = ops

    def process(self, logits: Tensor, rows: SlotRows) -> Processed:
        """Apply bias, penalties and suppression, in this order, to the rows that have them.

        Args:
            logits: [R, V]; left as it is.
            rows: the R rows.
        """
        changed = np.flatnonzero(rows.params["modified"])
        if changed.size == 0:
            return Processed(raw=logits, changed=changed, values=logits)
        out = logits[to_device(changed, logits.device)].to(torch.float32)
        for place, row in enumerate(changed.tolist()):
            if (bias := self.states.bias.get(int(rows.slots[row]))) is not None:
                out[place].index_add_(0, *bias)
        self._penalise(out, changed, rows)
        active = rows.positions < rows.params["suppress_before"]
        for place in np.flatnonzero(active[changed]).tolist():
            columns = self.states.suppressed.get(int(rows.slots[changed[place]]))
            if columns is not None:
                out[place].index_fill_(0, columns, -torch.inf)
        return Processed(raw=logits, changed=changed, values=out)

    def _penalise(self, out: Tensor, changed: IntArray, rows: SlotRows) -> None:
        places = np.flatnonzero(rows.params["penalised"][changed])
        if places.size == 0:
            return
        chosen = changed[places]
        index = to_device(np.stack([places, rows.slots[chosen]]), out.device)
        names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
        factors = np.stack([rows.params[chosen][name] for name in names])
        penalties = Penalties(rows=index[0], slots=index[1], factors=to_device(factors, out.device))
        states = self.states
        self._ops.penalise(out, states.prompt_seen, states.output_counts, penalties)

    def candidates(self, processed: Processed, best: Tensor, rows: SlotRows, width: int) -> Tensor:
        """What rank 0 needs of every row, of equal shape on all ranks.

        Args:
            processed: from `process`.
            best: int64 [R, 2], of the raw logits as `kernels.sampling.Greedy` gives it.
            rows: the R rows.
            width: C.

        Returns:
            int64 [R, C + 1]: C keys of processed logits, and whether the row has a NaN or plus
            infinity (1) or not (0). When rows report log-probabilities, one column more: the bits
            of their raw logits' log-sum-exp in float64, of the others -inf.
        """
        raw, first = processed.raw, self.states.vocab.start
        found = self._ops.best_keys(raw, first, width) if width > 1 else best
        if processed.changed.size:
            index = to_device(processed.changed, raw.device)
            other = self._ops.best_keys(processed.values, first, width)
            other[:, -1] |= best[index, -1]
            found = found.index_copy(0, index, other)
        if (reported := rows.reported()).size == 0:
            return found
        index = to_device(reported, raw.device)
        total = raw.new_full((raw.shape[0], 1), -torch.inf, dtype=torch.float64)
        total[index, 0] = self._ops.log_total(raw, index)
        return torch.cat([found, total.view(torch.int64)], dim=1)

    def full(
        self, processed: Processed, rows: SlotRows, full_rows: IntArray, padded: int
    ) -> Tensor:
        """Whole rows of this shard, of equal shape on all ranks.

        Args:
            processed: from `process`.
            rows: the R rows.
            full_rows: numbers of the F rows, on the host.
            padded: columns of the result, at least V.

        Returns:
            [F + n, padded]: the processed rows, then the raw ones of `SlotRows.raw_rows`; minus
            infinity beyond V. Of the logits' dtype when none of the rows is changed, else float32.
        """
        raw, raw_rows = processed.raw, rows.raw_rows(full_rows)
        pieces = processed.pieces(full_rows)
        dtype = raw.dtype if all(piece[0] is raw for piece in pieces) else torch.float32
        shape = (full_rows.size + raw_rows.size, padded)
        whole = torch.full(shape, -torch.inf, dtype=dtype, device=raw.device)
        pieces = [(logits, np.searchsorted(full_rows, r), p) for logits, r, p in pieces]
        pieces.append((raw, np.arange(full_rows.size, shape[0]), raw_rows))
        for logits, to, place in pieces:
            index = to_device(np.stack([to, place]), raw.device)
            whole[index[0], : raw.shape[1]] = logits[index[1]].to(dtype)
        return whole
