"""Reads slices of a checkpoint's tensors as they are stored, cast, checked and placed.

A tensor is read slice by slice into its final place, so that memory beside the shard stays within
one tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from kernels.nf4 import DenseWeight, NF4Weight, Weight
from sharding import Checkpoint, Span, WeightSlice
from sharding.blocks import stack_rows
from sharding.nf4 import BnbTensor
from sharding.quantize import quantize_slice

__all__ = ["Member", "TensorReader", "WeightError"]

_PLAIN: Final = (torch.float32, torch.float16, torch.bfloat16)

Member = tuple[str, tuple[int, int], WeightSlice]
"""Name, whole shape [out, in], and the rank's part of a weight."""


class WeightError(ValueError):
    """A checkpoint whose tensors are not what its configuration says; the tensor is named."""


class TensorReader:
    """One rank's reads of one checkpoint."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        dtype: torch.dtype,
        device: torch.device,
        quantize: bool,
        prepare: Callable[[Weight], Weight],
    ) -> None:
        """Plain tensors become ``dtype``; ``quantize`` turns plain `linear` weights into NF4;
        ``prepare`` is applied to every weight that is multiplied."""
        self.checkpoint = checkpoint
        self.dtype = dtype
        self.device = device
        self._quantize = quantize
        self.prepare = prepare

    def vector(self, *parts: tuple[str, int, Span]) -> Tensor:
        """Parts of vectors (name, whole size, the rank's part), one after the other."""
        out = self._new(sum(span.size for _, _, span in parts))
        at = 0
        for name, size, span in parts:
            self._check(name, (size,))
            self._fill(out[at : at + span.size], name, span, None)
            at += span.size
        return out

    def dense(self, *members: Member) -> Tensor:
        """Slices of plain matrices with equal columns, on top of one another."""
        out = self._new(sum(m[2].rows.size for m in members), members[0][2].cols.size)
        at = 0
        for name, shape, part in members:
            self._check(name, shape)
            self._fill(out[at : at + part.rows.size], name, part.rows, part.cols)
            at += part.rows.size
        return out

    def linear(self, members: Sequence[Member]) -> tuple[Weight, ...]:
        """Weights that share their input: fused into one, or one each where their kinds differ."""
        return tuple(map(self.prepare, self._linear(members)))

    def _linear(self, members: Sequence[Member]) -> tuple[Weight, ...]:
        stored = [self.quantized(name) for name, _, _ in members]
        if not any(stored) and not self._quantize:
            return (DenseWeight(weight=self.dense(*members)),)
        parts: list[Weight] = [
            self._nf4(member, quantized)
            if quantized or self._quantize
            else DenseWeight(weight=self.dense(member))
            for member, quantized in zip(members, stored, strict=True)
        ]
        packed = [part for part in parts if isinstance(part, NF4Weight)]
        if len(packed) == len(parts) and len({part.blocksize for part in packed}) == 1:
            return (self._place(stack_rows(packed)),)
        return tuple(self._place(p) if isinstance(p, NF4Weight) else p for p in parts)

    def holds(self, name: str) -> bool:
        """Whether the checkpoint has a tensor of this name."""
        return name in self.checkpoint

    def quantized(self, name: str) -> bool:
        """Whether it is stored as NF4."""
        return BnbTensor.is_quantized(self.checkpoint, name)

    def same(self, first: str, second: str, rows: Span) -> bool:
        """Whether some rows of two stored tensors have equal values."""
        a, b = (self.checkpoint.read_slice(name, rows) for name in (first, second))
        return torch.equal(a, b.to(a.dtype))

    def _nf4(self, member: Member, stored: bool) -> NF4Weight:
        name, shape, part = member
        if not stored:
            self._check(name, shape)
            try:
                return quantize_slice(self.checkpoint.stored(name), part.rows, part.cols)
            except ValueError as error:
                raise WeightError(f"{name}: {error}") from error
        tensor = BnbTensor.from_checkpoint(self.checkpoint, name)
        if tensor.shape != shape:
            raise WeightError(
                f"{name}: quantised from {list(tensor.shape)}, the configuration says {list(shape)}"
            )
        return tensor.cut(part.rows, part.cols)

    def _place(self, weight: NF4Weight) -> NF4Weight:
        return NF4Weight(
            codes=weight.codes.to(self.device),
            absmax=weight.absmax.to(self.device),
            phase=weight.phase.to(self.device),
            columns=weight.columns,
            blocksize=weight.blocksize,
        )

    def _new(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        found, dtype = self.checkpoint.shape(name), self.checkpoint.dtype(name)
        if found != shape:
            raise WeightError(f"{name}: shape {list(found)}, the configuration says {list(shape)}")
        if dtype not in _PLAIN:
            allowed = ", ".join(str(d).removeprefix("torch.") for d in _PLAIN)
            raise WeightError(f"{name}: dtype {dtype} is not supported: one of {allowed}")

    def _fill(self, out: Tensor, name: str, rows: Span, cols: Span | None) -> None:
        out.copy_(self.checkpoint.read_slice(name, rows, cols))
        if out.numel() == 0:
            return
        low, high = torch.aminmax(out)  # both NaN if there is any; allocates nothing
        if not bool(torch.isfinite(low) & torch.isfinite(high)):
            raise WeightError(f"{name}: holds NaN or infinity as {self.dtype}")
