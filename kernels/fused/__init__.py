"""The small ops between projections: norms, gated activation, rotary positions.

Legend: T rows of a step, D hidden or head size, I local intermediate size, Hq / Hkv local heads.
"""

from typing import Protocol

from torch import Tensor


class RMSNorm(Protocol):
    """Root-mean-square normalisation."""

    def __call__(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Normalise the last dimension.

        Semantics: n = x * rsqrt(mean(x^2) + eps) in float32; weight * (n cast to x.dtype), as in
        transformers' LlamaRMSNorm.

        x [..., D]; weight [D]; returns a new [..., D] in x.dtype. Raises ValueError, naming the
        argument, on a wrong shape or dtype.
        """
        ...


class AddRMSNorm(Protocol):
    """Residual addition and the norm behind it."""

    def __call__(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Add, then normalise.

        Semantics: s = x + residual in x.dtype; returns (rms_norm(s, weight, eps), s).

        x, residual [..., D] of one dtype; neither is written. Raises ValueError as `rms_norm`.
        """
        ...


class SiluMul(Protocol):
    """The gated activation of the MLP."""

    def __call__(self, gate_up: Tensor) -> Tensor:
        """Activate the gate half and multiply it by the up half.

        Semantics: silu(gate) rounded to the dtype, times up; gate = columns 0 .. I, up = I .. 2I.

        gate_up [T, 2I]; returns a new [T, I]. Raises ValueError on another shape.
        """
        ...


class Rotary(Protocol):
    """Rotary position embedding."""

    def __call__(
        self, q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Rotate queries and keys.

        Semantics: with halves (a, b) of a head and (c, s) of cos_sin[position]:
        (a * c - b * s, b * c + a * s); in float32, rounded once to the dtype. The pairing (i,
        i + D / 2) is transformers' `rotate_half`.

        q [T, Hq, D], k [T, Hkv, D], D even; cos_sin float32 [max_positions, D], the cosines in the
        first half of a row and the sines in the second; positions int64 [T]; returns new tensors.
        Head counts may be 0. Raises ValueError, naming the argument, on a wrong shape or dtype.
        """
        ...


__all__ = ["AddRMSNorm", "RMSNorm", "Rotary", "SiluMul"]
