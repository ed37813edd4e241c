"""The attention block of one rank: its query heads with their KV heads.

Legend: T rows of a step, Hq and Hkv local heads (may be 0), D head size, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.attention import HeadNorms
from kernels.dispatch import Ops
from tp_engine.layers.linear import ColumnParallel, RowParallel
from tp_engine.layers.lora import Projected
from tp_engine.layers.step import StepInput

__all__ = ["Attention"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Attention:
    """Rotate, store keys and values, attend, project back."""

    qkv: ColumnParallel
    o: RowParallel
    q_heads: int
    """Hq."""
    kv_heads: int
    """Hkv; 0 exactly when ``q_heads`` is."""
    head_dim: int
    """D."""
    q_norm: Tensor | None
    """[D], of each query head before it is rotated; None: no norm."""
    k_norm: Tensor | None
    """[D], of each key head."""
    eps: float
    """Of those norms."""
    window: int | None
    """Sliding window; None: the whole context."""
    ops: Ops

    def __call__(
        self, qkv: Projected, step: StepInput, cos_sin: Tensor, kv: tuple[Tensor, Tensor]
    ) -> Projected:
        """What ``qkv`` gave, the layer's caches ``kv`` -> [T, H], this rank's part."""
        if self.q_heads == 0:
            return self.o(qkv.base, step.lora)  # [T, 0]: only the sum over ranks is left to do
        return self.o(self._attend(qkv, step, cos_sin, kv), step.lora)

    def _attend(
        self, qkv: Projected, step: StepInput, cos_sin: Tensor, kv: tuple[Tensor, Tensor]
    ) -> Tensor:
        """qkv [T, (Hq + 2 Hkv) D] -> [T, Hq D]."""
        sizes = [self.q_heads, self.kv_heads, self.kv_heads]
        heads = qkv.total().view(-1, sum(sizes), self.head_dim)
        q, k, v = torch.split(heads, sizes, dim=1)
        out = self.ops.rotate_attend(
            q, k, v, *kv, cos_sin, step.positions, step.attention,
            norms=self._norms(), scale=self.head_dim**-0.5, window=self.window,
        )  # fmt: skip
        return out.flatten(1)

    def _norms(self) -> HeadNorms | None:
        if self.q_norm is None or self.k_norm is None:
            return None
        return HeadNorms(q=self.q_norm, k=self.k_norm, eps=self.eps)
