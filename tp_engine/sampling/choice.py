"""What was chosen for the rows of a step.

R sampled rows, N alternatives reported at most.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.sampling import keys
from tp_engine.messages import TokenLogprobs
from tp_engine.sampling.slots import SlotRows

__all__ = ["Choice"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """What was chosen."""

    picked: Tensor
    """int64 [R, 2]: a key (`kernels.sampling.keys`) of each row's token, and whether the row is
    broken (1) or not (0)."""
    logprobs: Tensor | None
    """float64 [R, 1 + N]: of the chosen token, then of the alternatives; None: nobody asked."""
    alternatives: Tensor | None
    """int64 [R, N]: ids, best first."""

    @property
    def failed(self) -> Tensor:
        """bool [R]: the row's logits hold NaN or plus infinity, or leave no token to choose."""
        return (self.picked[:, 1] != 0) | (keys.values_of(self.picked[:, 0]) == -torch.inf)

    @property
    def tokens(self) -> Tensor:
        """int64 [R]; 0 where ``failed``."""
        return keys.ids_of(self.picked[:, 0]).masked_fill(self.failed, 0)

    def to_host(self) -> Choice:
        """A copy on the host; on a GPU only begun, so wait for the stream before reading it."""
        return Choice(
            picked=_to_host(self.picked),
            logprobs=None if self.logprobs is None else _to_host(self.logprobs),
            alternatives=None if self.alternatives is None else _to_host(self.alternatives),
        )

    def report(self, rows: SlotRows) -> list[TokenLogprobs | None]:
        """Per row what its request asked for."""
        reports: list[TokenLogprobs | None] = [None] * self.picked.shape[0]
        if self.logprobs is None or self.alternatives is None:
            return reports
        tokens, failed = self.tokens.tolist(), self.failed.tolist()
        logprobs, ids = self.logprobs.tolist(), self.alternatives.tolist()
        for row in rows.reported().tolist():
            if failed[row]:
                continue
            chosen, *others = logprobs[row]
            wanted = int(rows.params["logprobs"][row])
            # Minus infinity: the vocabulary has fewer possible tokens than were asked for.
            others = [value for value in others[:wanted] if value > -torch.inf]
            reports[row] = TokenLogprobs(tokens[row], chosen, ids[row][: len(others)], others)
        return reports


def _to_host(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
