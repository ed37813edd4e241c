"""The gated MLP of one rank: some of the intermediate columns.

Legend: T rows of a step, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kernels.dispatch import Ops
from kernels.lora import LoraBatch
from tp_engine.layers.linear import ColumnParallel, RowParallel
from tp_engine.layers.lora import Projected

__all__ = ["MLP"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MLP:
    """down(silu(gate) * up)."""

    gate_up: ColumnParallel
    down: RowParallel
    ops: Ops

    def __call__(self, gate_up: Projected, lora: LoraBatch | None) -> Projected:
        """What ``gate_up`` gave -> [T, H], this rank's part."""
        return self.down(self.ops.silu_mul(gate_up.base, gate_up.delta), lora)

    def of_rows(self, x: Tensor, lora: LoraBatch) -> Projected:
        """x [T, H] -> [T, H], this rank's part; what `gate_up` and a call give one after the other.

        Where one launch does it, the deltas of gate and up are made in the activation; gains and
        biases have no place in that launch.
        """
        column = self.gate_up
        if lora.segments.affine:
            return self(column(x, lora), lora)
        both = column.lora.beside(lambda: column.base(x), x, lora, self.ops)
        if both is not None:
            return self(both, lora)
        gate_up = column.base(x)
        fused = self._activate(gate_up, x, lora)
        if fused is None:
            column.lora.add_(gate_up, x, lora, self.ops)
            return self(Projected(base=gate_up), lora)
        return self.down(fused[0], lora, fused[1])

    def _activate(self, y: Tensor, x: Tensor, lora: LoraBatch) -> tuple[Tensor, Tensor] | None:
        """The activation with deltas on both sides, and down's h; None: not in one launch."""
        if self.ops.lora_silu_mul is None:
            return None
        return self.ops.lora_silu_mul(y, x, lora, self.gate_up.lora.target, self.down.lora.target)
