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

All ops take the step's adapters and the target of a projection: `LoraBatch`, `LoraTarget`. They
raise ValueError, naming the argument, on a wrong shape or dtype.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from kernels.lora.segments import LoraBatch, LoraSegments
from kernels.lora.target import LoraTarget

RENEWAL = 1 << 20
"""Steps; see `LoraRenew`."""


class LoraShrink(Protocol):
    """The first half of a delta."""

    def __call__(self, x: Tensor, batch: LoraBatch, target: LoraTarget) -> Tensor:
        """Project rows onto the A rows of their own adapters.

        Semantics: h[i, t, j] = dot(x[t], A row j of sites[i] of t's adapter), summed in float32;
        zero where t has no adapter, the site isn't targeted, or j >= r.

        x [T, K] floating point, the input that all sites share; returns a new float32 [len(sites),
        T, max_rank]. T and K may be 0.

        A backend may return h in P parts instead, float32 [P, len(sites), T, max_rank], to be
        added in order by its own `lora_expand_`; what is said above to be zero is undefined there.
        """
        ...


class LoraExpand(Protocol):
    """The second half of a delta, added in place."""

    def __call__(self, y: Tensor, h: Tensor, batch: LoraBatch, target: LoraTarget) -> None:
        """Add the delta to the base output.

        Semantics: y[t, start : start + width] += scale * sum_j h[i, t, j] * (B column j of sites[i]
        of t's adapter), with (start, width) = spans[i]; base + delta is summed in float32 and
        rounded once to y.dtype. Rows without an adapter, and sites that it doesn't target, keep
        their bits.

        y [T, N_total] floating point, written in place; h as `lora_shrink` of the same backend
        returned it.
        """
        ...


class LoraAdd(Protocol):
    """Both halves of a delta at once."""

    def __call__(self, y: Tensor, x: Tensor, batch: LoraBatch, target: LoraTarget) -> None:
        """Add the delta of x to the base output.

        Semantics: `lora_expand_` of what `lora_shrink` returns for x, with the same arguments.
        """
        ...


class LoraAffine(Protocol):
    """What an adapter does to a projection beside its delta: gains (DoRA) and biases."""

    def __call__(
        self, y: Tensor, batch: LoraBatch, target: LoraTarget, bias: Tensor | None
    ) -> None:
        """Apply the gain row and the bias row of each row's own adapter, where there are such.

        Semantics: with c = bias, or 0 if it is None, and in the columns of spans[i], y[t] becomes
        (y[t] - c) * gain + c + own for the gain (or 1) and bias row (or 0) of sites[i] of t's
        adapter, in float32, rounded once to y.dtype. Where neither is there, y keeps its bits.

        y [T, N_total] floating point, written in place; bias [N_total], which y has in it and gains
        do not scale.
        """
        ...


class LoraBeside(Protocol):
    """Both halves of a delta, while the base product runs."""

    def __call__(
        self, base: Callable[[], Tensor], x: Tensor, batch: LoraBatch, target: LoraTarget
    ) -> tuple[Tensor, Tensor] | None:
        """Call `base` and make the delta of x, side by side where the device can.

        Semantics: returns (y, delta), y being what `base` returns; y + delta is what `lora_add_`
        with the same arguments makes of y, but for delta being rounded to y.dtype once. Where a
        row has no adapter, or it doesn't target the site, delta is -0.0: adding it changes nothing.

        `base` must write nothing that others read but its result [T, N_total], of x's dtype; spans
        lie side by side and cover N_total. None, with `base` not called, where there is no such
        way.
        """
        ...


class LoraRenew(Protocol):
    """What keeps launches apart for ever."""

    def __call__(self, device: torch.device) -> None:
        """Forget what earlier launches left on a device.

        To be called between steps, on their stream, once in `RENEWAL` of them: programs tell the
        words of their own launch by its number, of 31 bits, and what is left may not become so
        old that its number comes again. A step has fewer than 2**11 launches.
        """
        ...


class LoraSiluMul(Protocol):
    """The gated activation, behind a projection with deltas and before another."""

    def __call__(
        self, gate_up: Tensor, x: Tensor, batch: LoraBatch, target: LoraTarget, down: LoraTarget
    ) -> tuple[Tensor, Tensor] | None:
        """Add the deltas of x to gate and up, and activate, where one launch does it.

        Semantics: `lora_expand_` of what `lora_shrink` returns for x at the target, whose two sites
        are gate's and up's, onto both halves of gate_up; then `silu_mul`. gate_up itself is not
        written.

        x [T, K], gate_up [T, 2I] and the result [T, I] are of one dtype. Returns the result, and
        what `lora_shrink` of the same backend returns for it at `down`, which has one site; None
        where the parts are to be called.
        """
        ...


__all__ = [
    "RENEWAL",
    "LoraAdd",
    "LoraAffine",
    "LoraBatch",
    "LoraBeside",
    "LoraExpand",
    "LoraRenew",
    "LoraSegments",
    "LoraShrink",
    "LoraSiluMul",
    "LoraTarget",
]
