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
    ops: Ops
    comm: Comm

    def __call__(self, tokens: Tensor) -> Tensor:
        """tokens int64 [T] -> [T, H], equal on all ranks."""
        return self.comm.all_reduce(self.ops.embed(tokens, self.weight, self.span.start))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LMHead:
    """Logits of the rank's own vocabulary rows; gathering them is the sampler's business."""

    weight: Weight
    """[V, H]."""
    ops: Ops

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [R, H] -> [R, V] of the same dtype."""
        return self.ops.linear(hidden, self.weight)
