"""Random weights made on the device: the shapes and bytes of a model without its files."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kernels.nf4 import DenseWeight, NF4Weight, Weight
from sharding import Span, WeightSlice
from tp_engine.weights.reader import Member

__all__ = ["DummyReader"]

BLOCK = 64
"""Values an NF4 block."""
STD = 0.02
"""Standard deviation of the weights, as models are initialised."""


class DummyReader:
    """Stands in for `TensorReader`; the values depend on ``seed`` and the order of the calls."""

    def __init__(
        self,
        *,
        dtype: torch.dtype,
        device: torch.device,
        quantize: bool,
        seed: int,
        prepare: Callable[[Weight], Weight],
    ) -> None:
        self._dtype = dtype
        self._device = device
        self._quantize = quantize
        self.prepare = prepare
        self._random = torch.Generator(device).manual_seed(seed)

    def vector(self, *parts: tuple[str, int, Span]) -> Tensor:
        """Ones: norms that change nothing, biases that hardly matter."""
        size = sum(span.size for _, _, span in parts)
        return torch.ones(size, dtype=self._dtype, device=self._device)

    def dense(self, *members: Member) -> Tensor:
        """Normal values in the members' local shape."""
        rows, columns = _local(members)
        out = torch.empty((rows, columns), dtype=self._dtype, device=self._device)
        return out.normal_(std=STD, generator=self._random)

    def linear(self, members: Sequence[Member]) -> tuple[Weight, ...]:
        """One fused weight, dense or NF4."""
        if not self._quantize:
            return (self.prepare(DenseWeight(weight=self.dense(*members))),)
        rows, columns = _local(members)
        codes = torch.empty((rows, (columns + 1) // 2), dtype=torch.uint8, device=self._device)
        absmax = torch.empty((rows, -(-columns // BLOCK)), device=self._device)
        weight = NF4Weight(
            codes=codes.random_(0, 256, generator=self._random),
            absmax=absmax.uniform_(STD, 3 * STD, generator=self._random),
            phase=torch.zeros(rows, dtype=torch.int32, device=self._device),
            columns=columns,
            blocksize=BLOCK,
        )
        return (self.prepare(weight),)

    def holds(self, name: str) -> bool:
        """No name is stored."""
        return False

    def quantized(self, name: str) -> bool:
        """No name is stored."""
        return False

    def same(self, first: str, second: str, rows: Span) -> bool:
        """Never asked: no name is stored."""
        raise AssertionError(f"{first} and {second} are not stored")


def _local(members: Sequence[Member]) -> tuple[int, int]:
    parts: list[WeightSlice] = [part for _, _, part in members]
    return sum(part.rows.size for part in parts), parts[0].cols.size
