"""Where the adapters' deltas join a projection: one delta for all fused members."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from kernels.dispatch import Ops
from kernels.lora import LoraBatch, LoraTarget
from sharding import SITES

__all__ = ["LoraSites", "Projected", "has_deltas"]


def has_deltas(batch: LoraBatch | None) -> bool:
    """Say whether adapters add anything in a step."""
    return batch is not None and batch.segments.max_rank > 0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Projected:
    """What a projection gives, as two tensors that whoever reads it adds."""

    base: Tensor
    """[T, N]."""
    delta: Tensor | None = None
    """[T, N] of the adapters; None: nothing is left to add."""

    def total(self) -> Tensor:
        """[T, N]."""
        return self.base if self.delta is None else self.base + self.delta

    def of_rows(self, rows: Tensor) -> Projected:
        """Of some rows only."""
        return Projected(
            base=self.base[rows], delta=None if self.delta is None else self.delta[rows]
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraSites:
    """Where adapters change one projection."""

    target: LoraTarget
    """Its sites, and this rank's out-features of each."""

    @classmethod
    def of(cls, layer: int, names: Sequence[str], widths: Sequence[int]) -> Self:
        """Sites side by side, ``widths`` being their local out-features."""
        starts = [sum(widths[:i]) for i in range(len(widths))]
        target = LoraTarget(
            layer=layer,
            sites=tuple(SITES.index(name) for name in names),
            num_sites=len(SITES),
            spans=tuple(zip(starts, widths, strict=True)),
        )
        return cls(target=target)

    def project(
        self,
        base: Callable[[], Tensor],
        x: Tensor,
        bias: Tensor | None,
        batch: LoraBatch | None,
        ops: Ops,
    ) -> Projected:
        """What ``base`` gives, which is the projection of x [T, K] and has ``bias`` [N] in it, and
        what adapters do to it."""
        both = self.beside(base, x, batch, ops)
        if both is None:
            both = Projected(base=base())
            self.add_(both.base, x, batch, ops)
            self.affine_(both.base, bias, batch, ops)
        return both

    def beside(
        self, base: Callable[[], Tensor], x: Tensor, batch: LoraBatch | None, ops: Ops
    ) -> Projected | None:
        """The same with deltas made while ``base`` runs; None, ``base`` not called: not so."""
        if batch is None or not has_deltas(batch) or batch.segments.affine:
            return None  # gains scale the sum of both
        if ops.lora_beside is None:
            return None
        both = ops.lora_beside(base, x, batch, self.target)
        return None if both is None else Projected(base=both[0], delta=both[1])

    def add_(self, y: Tensor, x: Tensor, batch: LoraBatch | None, ops: Ops) -> None:
        """y [T, N] += each row's own delta of x [T, K]; nothing to do without adapters."""
        if batch is not None and has_deltas(batch):
            ops.lora_add_(y, x, batch, self.target)

    def affine_(self, y: Tensor, bias: Tensor | None, batch: LoraBatch | None, ops: Ops) -> None:
        """Apply each row's own gains and biases to y [T, N], which has the base's bias [N] in it
        and its delta too; nothing to do without such adapters."""
        if batch is not None and batch.segments.affine:
            ops.lora_affine_(y, batch, self.target, bias)
