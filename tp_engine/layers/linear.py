"""Linear layers cut by rows (out-features) or by columns (in-features).

Legend: T rows of a step, K in-features, N out-features; local sizes may be 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels.dispatch import Ops
from kernels.lora import LoraBatch
from kernels.nf4 import Weight
from tp_engine.layers.lora import LoraSites, Projected, has_deltas

if TYPE_CHECKING:
    from tp_engine.ranks.comm import Comm

__all__ = ["ColumnParallel", "RowParallel"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ColumnParallel:
    """Projections that read the same input; each rank computes some out-features of each.

    The result stays on the rank: no collective. Biases are cut like the out-features.
    """

    weights: tuple[Weight, ...]
    """One weight with the rows of all members, or one a member where their kinds differ."""
    bias: Tensor | None
    """[N] of all members."""
    lora: LoraSites
    """One site a member."""
    ops: Ops

    def __call__(self, x: Tensor, lora: LoraBatch | None) -> Projected:
        """x [T, K] -> [T, N local], members side by side."""
        return self.lora.project(lambda: self.base(x), x, self.bias, lora, self.ops)

    def after_norm(
        self, x: Projected, residual: Tensor, norm: Tensor, eps: float, lora: LoraBatch | None
    ) -> tuple[Projected, Tensor]:
        """The projection of rms_norm(x + residual), and that sum.

        x, residual [T, K], norm [K] -> [T, N local], [T, K].
        """
        if len(self.weights) == 1 and not has_deltas(lora):
            both = self.ops.norm_linear(x.total(), residual, norm, eps, self.weights[0], self.bias)
            return Projected(base=both[0]), both[1]
        normed, total = self.ops.add_rms_norm(x.base, residual, norm, eps, x.delta)
        return self(normed, lora), total

    def base(self, x: Tensor) -> Tensor:
        """x [T, K] -> [T, N local], without adapters."""
        if len(self.weights) == 1:
            return self.ops.linear(x, self.weights[0], self.bias)
        sizes = [w.out_features for w in self.weights]
        biases = [None] * len(sizes) if self.bias is None else torch.split(self.bias, sizes)
        members = zip(self.weights, biases, strict=True)
        return torch.cat([self.ops.linear(x, w, bias) for w, bias in members], dim=1)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RowParallel:
    """A projection of which each rank reads some in-features; what it gives is to be summed over
    the ranks (see `sum_add_norm`).

    A is cut like the in-features and B is whole, so that one sum takes the base's and the
    adapters' parts together. Gains apply to each rank's part; rank 0 alone adds biases.
    """

    weight: Weight
    bias: Tensor | None
    """[N], whole."""
    lora: LoraSites
    """One site."""
    ops: Ops
    comm: Comm

    def __call__(self, x: Tensor, lora: LoraBatch | None, h: Tensor | None = None) -> Projected:
        """x [T, K local] -> [T, N], this rank's part; h, if known: `ops.lora_shrink` of x."""
        bias = self.bias if self.comm.rank == 0 else None

        def base() -> Tensor:
            return self.ops.linear(x, self.weight, bias)

        if lora is None or h is None:
            return self.lora.project(base, x, bias, lora, self.ops)
        y = base()
        self.ops.lora_expand_(y, h, lora, self.lora.target)
        self.lora.affine_(y, bias, lora, self.ops)
        return Projected(base=y)
