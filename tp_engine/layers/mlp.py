"""The gated MLP of one rank: some of the intermediate columns.

Legend: T rows of a step, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kernels.dispatch import Ops
from tp_engine.layers.linear import ColumnParallel, RowParallel
from tp_engine.layers.step import LoraBatch

__all__ = ["MLP"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MLP:
    """down(silu(gate) * up)."""

    gate_up: ColumnParallel
    down: RowParallel
    ops: Ops

    def __call__(self, gate_up: Tensor, lora: LoraBatch | None) -> Tensor:
        """What ``gate_up`` gave -> [T, H], this rank's part."""
        return self.down(self.ops.silu_mul(gate_up), lora)
