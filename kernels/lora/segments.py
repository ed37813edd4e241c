"""The adapters of a step: where their rank-rows are, and which rows of the step are whose."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LoraSegments:
    """Which rows of a step belong to which adapter. A new one is made for every step.

    Raises ValueError, naming the field, on a wrong shape or dtype.
    """

    offsets: Tensor
    """int32 [G + 1], ascending from 0 to T: segment g is rows offsets[g] .. offsets[g + 1]."""
    descriptors: Tensor
    """int64 [G], the descriptor number of each segment; -1: base rows."""
    max_rank: int
    """The largest r of any site of any adapter in the step; 0: no adapter."""
    affine: bool = False
    """Whether any adapter in the step has a gain or a bias row; if none has, `lora_affine_` has
    nothing to do."""
    max_rows: int | None = None
    """No segment of an adapter has more rows; None: no bound but T. Grids have room for
    so many."""
    tiles: Tensor | None = None
    """int32 [C, 4], the segments cut into tiles of up to `tiles.TILE_ROWS` rows, each (descriptor
    number, first row, end row, tiles in all); those that are left over have number and rows -1. C
    is at least 1. None: not known. Kernels for few rows need them."""
    memo: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)
    """What a backend derived on the host from the records, kept for this step only: records may
    be rewritten between steps, never within one."""

    def __post_init__(self) -> None:
        numbers, offsets = self.descriptors, self.offsets
        if numbers.ndim != 1 or numbers.dtype != torch.int64 or not numbers.is_contiguous():
            raise ValueError(f"descriptors must be contiguous int64 [G], got {_describe(numbers)}")
        expected = (numbers.shape[0] + 1,)
        if (
            offsets.dtype != torch.int32
            or tuple(offsets.shape) != expected
            or not offsets.is_contiguous()
        ):
            raise ValueError(
                f"offsets must be contiguous int32 {expected}, got {_describe(offsets)}"
            )
        tiles = self.tiles
        if tiles is not None and not (
            tiles.dtype == torch.int32
            and tiles.ndim == 2
            and (tiles.shape[0] > 0 and tiles.shape[1] == 4)
            and tiles.is_contiguous()
        ):
            raise ValueError(f"tiles must be contiguous int32 [C > 0, 4], got {_describe(tiles)}")
        if self.max_rank < 0:
            raise ValueError(f"max_rank must be >= 0, got {self.max_rank}")
        if self.max_rows is not None and self.max_rows < 0:
            raise ValueError(f"max_rows must be >= 0 or None, got {self.max_rows}")

    def longest(self, rows: int) -> int:
        """Return a bound of the rows of a segment of an adapter, in a step of so many rows."""
        return rows if self.max_rows is None else min(rows, self.max_rows)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LoraBatch:
    """The adapters of a step. Raises ValueError, naming the field, on a wrong shape or dtype."""

    arena: Tensor
    """uint8, flat: what all byte offsets count from."""
    descriptors: Tensor
    """int64, flat: the records of all resident adapters."""
    segments: LoraSegments
    """Which rows are whose."""

    def __post_init__(self) -> None:
        for name, dtype in (("arena", torch.uint8), ("descriptors", torch.int64)):
            tensor: Tensor = getattr(self, name)
            if tensor.ndim != 1 or tensor.dtype != dtype or not tensor.is_contiguous():
                raise ValueError(f"{name} must be flat contiguous {dtype}, got {_describe(tensor)}")


def _describe(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} of strides {tensor.stride()}"


__all__ = ["LoraBatch", "LoraSegments"]
