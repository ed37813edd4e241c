"""The two ends of the model, cut by vocabulary rows.

Legend: T rows of a step, R rows with logits, V local vocabulary rows (may be 0), H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor
from torch.nn.functional import embedding

from kernels.dispatch import Ops
from kernels.nf4 import Weight
from sharding import Span

if TYPE_CHECKING:
    from tp_engine.comm import Comm

__all__ = ["LMHead", "VocabEmbedding"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class VocabEmbedding:
    """Each rank looks up its own rows; the others' are zeros, so that the sum is exact."""

    weight: Tensor
    """[V, H]."""
    span: Span
    """The token ids of those rows."""
    comm: Comm

    def __call__(self, tokens: Tensor) -> Tensor:
        """tokens int64 [T] -> [T, H], equal on all ranks."""
        if self.span.size == 0:
            return self.comm.all_reduce(self.weight.new_zeros(*tokens.shape, self.weight.shape[1]))
        local = tokens - self.span.start
        foreign = (local < 0) | (local >= self.span.size)
        rows = embedding(local.masked_fill(foreign, 0), self.weight)
        return self.comm.all_reduce(rows.masked_fill_(foreign[:, None], 0.0))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LMHead:
    """Logits of the rank's own vocabulary rows; gathering them is the sampler's business."""

    weight: Weight
    """[V, H]."""
    ops: Ops

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [R, H] -> float32 [R, V]."""
        return self.ops.linear(hidden, self.weight).float()
