"""The gated MLP of one rank: some of the intermediate columns.

Legend: T rows of a step, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kernels.dispatch import Ops
from sharding import SITES
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

    def of_rows(self, x: Tensor, lora: LoraBatch) -> Tensor:
        """x [T, H] -> [T, H], this rank's part; what `gate_up` and a call give one after the other.

        Where one launch does it, the deltas of gate and up are added in the activation; gains and
        biases have no place in that launch.
        """
        if lora.segments.affine:
            return self(self.gate_up(x, lora), lora)
        gate_up = self.gate_up(x, None)
        fused = self._activate(gate_up, x, lora)
        if fused is None:
            self.gate_up.lora.add_(gate_up, x, lora, self.ops)
            return self(gate_up, lora)
        return self.down(fused[0], lora, fused[1])

    def _activate(self, y: Tensor, x: Tensor, lora: LoraBatch) -> tuple[Tensor, Tensor] | None:
        """The activation with deltas on both sides, and down's h; None: not in one launch."""
        if self.ops.lora_silu_mul is None:
            return None
        return self.ops.lora_silu_mul(
            y,
            x,
            lora.arena,
            lora.descriptors,
            lora.segments,
            layer=self.gate_up.lora.layer,
            sites=self.gate_up.lora.sites,
            down=self.down.lora.sites[0],
            num_sites=len(SITES),
        )
