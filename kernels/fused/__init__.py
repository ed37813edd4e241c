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
        self,
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        eps: float,
        delta: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Add, then normalise.

        Semantics: x = x + delta if there is one; s = x + residual, in x.dtype both; returns
        (rms_norm(s, weight, eps), s).

        x, residual, delta [..., D] of one dtype; none is written. Raises ValueError as `rms_norm`.
        """
        ...


class SiluMul(Protocol):
    """The gated activation of the MLP."""

    def __call__(self, gate_up: Tensor, delta: Tensor | None = None) -> Tensor:
        """Activate the gate half and multiply it by the up half.

        Semantics: gate_up = gate_up + delta in its dtype, if there is one; silu(gate) rounded to
        the dtype, times up; gate = columns 0 .. I, up = I .. 2I.

        gate_up, delta [T, 2I] of one dtype, not written; returns a new [T, I]. Raises ValueError,
        naming the argument, on another shape or dtype.
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
