"""LoRA deltas of many adapters in one batch, read from the arena's rank-rows.

Legend: T rows of a step, G segments, S sites a layer, K in-features, N out-features (local), r LoRA
rank.

A *rank-row* is one row of A or one column of B of one module in one layer: contiguous in the arena,
of the local width, in the activations' dtype, at a byte offset that is a multiple of 16. Likewise a
*gain row* and a *bias row* of N float32 numbers, which a module may have. An adapter is found
through its *descriptor record* in one flat int64 tensor; the record begins at word d, the
descriptor number:

    d + 2 * (layer * S + site)       (first << 16) | r        r = 0: the site isn't targeted
    d + 2 * (layer * S + site) + 1   the bits of the float64 scale
    d + first + i          (i < r)   byte offset of row i of A   (K elements)
    d + first + r + i      (i < r)   byte offset of column i of B (N elements)
    d + first + 2 * r                byte offset of the gain row, -1: none
    d + first + 2 * r + 1            byte offset of the bias row, -1: none
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

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
    """No segment of an adapter has more rows; None: no bound but T. Kernels choose by it."""
    tiles: Tensor | None = None
    """int32 [C, 4], the segments cut into tiles of up to `tiles.TILE_ROWS` rows, each (descriptor
    number, first row, end row, tiles in all); those that are left over have number and rows -1.
    None: not known. Kernels for few rows need them."""
    memo: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)
    """What a backend derived on the host from the records, kept for this step only: records may
    be rewritten between steps, never within one."""

    def __post_init__(self) -> None:
        if self.descriptors.ndim != 1 or self.descriptors.dtype != torch.int64:
            raise ValueError(
                f"descriptors must be int64 [G], got {self.descriptors.dtype} "
                f"{tuple(self.descriptors.shape)}"
            )
        expected = (self.descriptors.shape[0] + 1,)
        if self.offsets.dtype != torch.int32 or tuple(self.offsets.shape) != expected:
            raise ValueError(
                f"offsets must be int32 {expected}, got {self.offsets.dtype} "
                f"{tuple(self.offsets.shape)}"
            )
        if self.tiles is not None and (
            self.tiles.dtype != torch.int32
            or self.tiles.shape != (self.tiles.shape[0], 4)
            or not self.tiles.is_contiguous()
        ):
            raise ValueError(
                f"tiles must be contiguous int32 [C, 4], got {self.tiles.dtype} "
                f"{tuple(self.tiles.shape)}"
            )
        if self.max_rank < 0:
            raise ValueError(f"max_rank must be >= 0, got {self.max_rank}")
        if self.max_rows is not None and self.max_rows < 0:
            raise ValueError(f"max_rows must be >= 0 or None, got {self.max_rows}")


class LoraShrink(Protocol):
    """The first half of a delta."""

    def __call__(
        self,
        x: Tensor,
        arena: Tensor,
        descriptors: Tensor,
        segments: LoraSegments,
        *,
        layer: int,
        sites: tuple[int, ...],
        num_sites: int,
    ) -> Tensor:
        """Project rows onto the A rows of their own adapters.

        Semantics: h[i, t, j] = dot(x[t], A row j of sites[i] of t's adapter), summed in float32;
        zero where t has no adapter, the site isn't targeted, or j >= r.

        x [T, K] floating point, the input that all `sites` share; arena uint8 flat; descriptors
        int64 flat; returns a new float32 [len(sites), T, max_rank]. T and K may be 0. Raises
        ValueError, naming the argument, on a wrong shape or dtype.

        A backend may return h in P parts instead, float32 [P, len(sites), T, max_rank], to be
        added in order by its own `lora_expand_`; what is said above to be zero is undefined there.
        """
        ...


class LoraExpand(Protocol):
    """The second half of a delta, added in place."""

    def __call__(
        self,
        y: Tensor,
        h: Tensor,
        arena: Tensor,
        descriptors: Tensor,
        segments: LoraSegments,
        *,
        layer: int,
        sites: tuple[int, ...],
        num_sites: int,
        spans: tuple[tuple[int, int], ...],
    ) -> None:
        """Add the delta to the base output.

        Semantics: y[t, start : start + width] += scale * sum_j h[i, t, j] * (B column j of sites[i]
        of t's adapter), with (start, width) = spans[i]; base + delta is summed in float32 and
        rounded once to y.dtype. Rows without an adapter, and sites that it doesn't target, keep
        their bits.

        y [T, N_total] floating point, written in place; h as `lora_shrink` of the same backend
        returned it; spans are disjoint and inside N_total. Widths may be 0. Raises ValueError,
        naming the argument, on a wrong shape or dtype.
        """
        ...


class LoraAdd(Protocol):
    """Both halves of a delta at once."""

    def __call__(
        self,
        y: Tensor,
        x: Tensor,
        arena: Tensor,
        descriptors: Tensor,
        segments: LoraSegments,
        *,
        layer: int,
        sites: tuple[int, ...],
        num_sites: int,
        spans: tuple[tuple[int, int], ...],
    ) -> None:
        """Add the delta of x to the base output.

        Semantics: `lora_expand_` of what `lora_shrink` returns for x, with the same arguments and
        errors.
        """
        ...


class LoraAffine(Protocol):
    """What an adapter does to a projection beside its delta: gains (DoRA) and biases."""

    def __call__(
        self,
        y: Tensor,
        arena: Tensor,
        descriptors: Tensor,
        segments: LoraSegments,
        *,
        layer: int,
        sites: tuple[int, ...],
        num_sites: int,
        spans: tuple[tuple[int, int], ...],
        bias: Tensor | None,
    ) -> None:
        """Apply the gain row and the bias row of each row's own adapter, where there are such.

        Semantics: with c = bias, or 0 if it is None, and in the columns of spans[i], y[t] becomes
        (y[t] - c) * gain + c + own for the gain (or 1) and bias row (or 0) of sites[i] of t's
        adapter, in float32, rounded once to y.dtype. Where neither is there, y keeps its bits.

        y [T, N_total] floating point, written in place; bias [N_total], which y has in it and gains
        do not scale; the rest as in `lora_expand_`. Raises ValueError, naming the argument, on a
        wrong shape or dtype.
        """
        ...


class LoraBeside(Protocol):
    """Both halves of a delta, while the base product runs."""

    def __call__(
        self,
        base: Callable[[], Tensor],
        x: Tensor,
        arena: Tensor,
        descriptors: Tensor,
        segments: LoraSegments,
        *,
        layer: int,
        sites: tuple[int, ...],
        num_sites: int,
        spans: tuple[tuple[int, int], ...],
    ) -> tuple[Tensor, Tensor] | None:
        """Call `base` and make the delta of x, side by side where the device can.

        Semantics: returns (y, delta), y being what `base` returns; y + delta is what `lora_add_`
        with the same arguments makes of y, but for delta being rounded to y.dtype once. Where a
        row has no adapter, or it doesn't target the site, delta is -0.0: adding it changes nothing.

        `base` must write nothing that others read but its result [T, N_total], of x's dtype; spans
        lie side by side and cover N_total. None, with `base` not called, where there is no such
        way. Raises ValueError as `lora_add_`.
        """
        ...


class LoraSiluMul(Protocol):
    """The gated activation, behind a projection with deltas and before another."""

    def __call__(
        self,
        gate_up: Tensor,
        x: Tensor,
        arena: Tensor,
        descriptors: Tensor,
        segments: LoraSegments,
        *,
        layer: int,
        sites: tuple[int, ...],
        down: int,
        num_sites: int,
    ) -> tuple[Tensor, Tensor] | None:
        """Add the deltas of x to gate and up, and activate, where one launch does it.

        Semantics: `lora_expand_` of what `lora_shrink` returns for x at `sites`, gate's and up's,
        onto both halves of gate_up; then `silu_mul`. gate_up itself is not written.

        x [T, K], gate_up [T, 2I] and the result [T, I] are of one dtype. Returns the result, and
        what `lora_shrink` of the same backend returns for it at site `down`; None where the parts
        are to be called. Raises ValueError, naming the argument, on a wrong shape or dtype.
        """
        ...


__all__ = [
    "LoraAdd",
    "LoraAffine",
    "LoraBeside",
    "LoraExpand",
    "LoraSegments",
    "LoraShrink",
    "LoraSiluMul",
]
