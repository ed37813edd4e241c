"""Rotary position embedding: the variants ``default``, ``linear``, ``llama3`` and ``yarn``.

Legend: D head size, P positions.

Parameters and formulas follow transformers' ``modeling_rope_utils``: both the ``rope_parameters``
object and the older pair ``rope_theta`` / ``rope_scaling`` are read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from tp_engine.models.fields import Fields

__all__ = ["RopeSpec", "cos_sin_table", "inverse_frequencies"]

DEFAULT_THETA: Final = 10_000.0
_COMMON: Final = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_ORIGINAL: Final = "original_max_position_embeddings"
_KEYS: Final = {
    "default": _COMMON,
    "linear": _COMMON | {"factor"},
    "llama3": _COMMON | {"factor", "low_freq_factor", "high_freq_factor"},
    "yarn": _COMMON
    | {"factor", "beta_fast", "beta_slow", "attention_factor"}
    | {"mscale", "mscale_all_dim", "truncate"},
}
_UNUSED: Final = {_ORIGINAL, "finetuned"}
"""Accepted everywhere: notes about the training that no formula of the variant reads."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeSpec:
    """One variant with all its parameters resolved; fields of other variants keep defaults."""

    rope_type: str = "default"
    """``default``, ``linear``, ``llama3`` or ``yarn``."""
    theta: float = DEFAULT_THETA
    """Base of the wavelengths."""
    factor: float = 1.0
    """How much longer the context became."""
    original_positions: int = 0
    """Context before that; for llama3 and yarn."""
    low_freq_factor: float = 1.0
    """llama3: wavelengths above original_positions / this are stretched by ``factor``."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths below original_positions / this are kept."""
    beta_fast: float = 32.0
    """yarn: dimensions that turn more often than this are kept."""
    beta_slow: float = 1.0
    """yarn: dimensions that turn less often than this are stretched by ``factor``."""
    truncate: bool = True
    """yarn: widen the ramp between the two to whole dimensions."""
    attention_factor: float = 1.0
    """Multiplies cosines and sines."""

    @classmethod
    def from_config(cls, config: Fields, max_positions: int) -> RopeSpec:
        """Read a model's fields; ``max_positions`` is its ``max_position_embeddings``.

        Raises:
            UnsupportedModel: another variant, partial rotation, parameters by layer type, or a
                parameter that the variant does not know; named.
        """
        name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
        rope = config.object(name) or Fields({}, f"{config.source}: {name}")
        kind = rope.get("rope_type") or rope.get("type") or "default"
        if kind not in _KEYS:
            raise rope.refuse("rope_type", "one of " + ", ".join(_KEYS), kind)
        for key in rope.names:
            if key not in _KEYS[kind] | _UNUSED:
                raise rope.refuse(key, f"rope_type {kind!r} has no such parameter")
        for fields in (rope, config):
            if fields.get("partial_rotary_factor") not in (None, 1):
                raise fields.refuse("partial_rotary_factor", "heads are rotated as a whole")
        theta = rope.number("rope_theta", config.number("rope_theta", DEFAULT_THETA))
        if theta <= 1:
            raise rope.refuse("rope_theta", "above 1", theta)
        if kind == "default":
            return cls(theta=theta)
        if kind == "linear":
            return cls(rope_type=kind, theta=theta, factor=rope.number("factor"))
        owner = config if config.get(_ORIGINAL) is not None else rope
        original = owner.integer(_ORIGINAL, max_positions)
        if kind == "llama3":
            return cls._llama3(rope, theta, original)
        return cls._yarn(rope, theta, original, max_positions)

    @classmethod
    def _llama3(cls, rope: Fields, theta: float, original: int) -> RopeSpec:
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        if high <= low:
            raise rope.refuse("high_freq_factor", f"must be above low_freq_factor={low}")
        return cls(
            rope_type="llama3",
            theta=theta,
            factor=rope.number("factor"),
            original_positions=original,
            low_freq_factor=low,
            high_freq_factor=high,
        )

    @classmethod
    def _yarn(cls, rope: Fields, theta: float, original: int, max_positions: int) -> RopeSpec:
        factor = rope.number("factor", max_positions / original)
        return cls(
            rope_type="yarn",
            theta=theta,
            factor=factor,
            original_positions=original,
            # transformers takes 0 for "not given" here
            beta_fast=rope.number("beta_fast", 32.0) if rope.get("beta_fast") else 32.0,
            beta_slow=rope.number("beta_slow", 1.0) if rope.get("beta_slow") else 1.0,
            truncate=rope.flag("truncate", True),
            attention_factor=_yarn_attention(rope, factor),
        )


def _yarn_attention(rope: Fields, factor: float) -> float:
    """Given, or 0.1 ln(factor) + 1 (Peng et al. 2023), or the ratio of two scaled ones."""
    if rope.get("attention_factor") is not None:
        return rope.number("attention_factor")

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return scale(rope.number("mscale")) / scale(rope.number("mscale_all_dim"))
    return scale(1.0)


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> Tensor:
    """Angle per position of each pair of dimensions, float32 [D / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    base = 1.0 / (rope.theta**exponents)
    if rope.rope_type == "llama3":
        return _stretch_llama3(rope, base)
    if rope.rope_type == "yarn":
        return _stretch_yarn(rope, base, head_dim)
    return base / rope.factor


def _stretch_llama3(rope: RopeSpec, base: Tensor) -> Tensor:
    """Stretch long wavelengths, keep short ones, blend in between."""
    turns = rope.original_positions * base / (2 * math.pi)  # full turns over the original context
    low, high = rope.low_freq_factor, rope.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return keep * base + (1 - keep) * base / rope.factor


def _stretch_yarn(rope: RopeSpec, base: Tensor, head_dim: int) -> Tensor:
    """Stretch slow dimensions, keep fast ones, a linear ramp over the dimensions in between."""

    def dimension(turns: float) -> float:
        """The (fractional) pair of dimensions that turns so often over the original context."""
        wavelength = rope.original_positions / (turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    pairs = torch.arange(head_dim // 2, dtype=torch.float32)
    stretch = ((pairs - low) / width).clamp(0, 1)
    return stretch * base / rope.factor + (1 - stretch) * base


def cos_sin_table(
    rope: RopeSpec, head_dim: int, positions: int, device: torch.device | None = None
) -> Tensor:
    """The table that ``ops.rotary`` reads: float32 [P, D], a row's cosines, then its sines."""
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * inverse_frequencies(
        rope, head_dim
    )  # [P, D / 2]
    table = torch.cat((angles.cos(), angles.sin()), dim=1) * rope.attention_factor
    return table.to(device)
