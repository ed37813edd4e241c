"""The two ends of the model, cut by vocabulary rows.

Legend: T rows of a step, R rows with logits, V local vocabulary rows (may be 0), H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from kernels.dispatch import Ops
from kernels.nf4 import Weight
from sharding import Span
from tp_engine.layers.step import EndRows

if TYPE_CHECKING:
    from tp_engine.ranks.comm import Comm

__all__ = ["LMHead", "VocabEmbedding"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class VocabEmbedding:
    """Each rank looks up its own rows; the others' are zeros, so that the sum is exact."""

    weight: Tensor
    """[V, H]."""
    span: Span
    """The token ids of those rows."""
    ops: Ops
    comm: Comm

    def __call__(self, tokens: Tensor, ends: EndRows | None = None) -> Tensor:
        """tokens int64 [T] -> [T, H], equal on all ranks."""
        part = self.ops.embed(tokens, self.weight, self.span.start)
        if ends is not None and self.span.size:
            for rows, change in ends.embedding:
                change.embed_(part[rows], tokens[rows] - self.span.start, self.span.size, self.ops)
        return self.comm.all_reduce(part)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LMHead:
    """Logits of the rank's own vocabulary rows; gathering them is the sampler's business."""

    weight: Weight
    """[V, H]."""
    ops: Ops

    def __call__(self, hidden: Tensor, ends: EndRows | None = None) -> Tensor:
        """hidden [R, H] -> [R, V] of the same dtype."""
        logits = self.ops.linear(hidden, self.weight)
        for rows, change in () if ends is None else ends.head:
            change.project_(logits[rows], hidden[rows], self.ops)
        return logits
