"""Norms, activation and rotary positions in plain torch: the truth for every other
implementation."""

import torch
from torch import Tensor
from torch.nn.functional import silu

from kernels.checks import check_gate_up, check_norm, check_rotary
from kernels.fused.delta import with_delta


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `kernels.fused.RMSNorm`."""
    check_norm(x, weight)
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (weight * normed.to(x.dtype)).to(x.dtype)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, delta: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See `kernels.fused.AddRMSNorm`."""
    check_norm(x, weight, residual)
    total = with_delta(x, delta) + residual
    return rms_norm(total, weight, eps), total


def silu_mul(gate_up: Tensor, delta: Tensor | None = None) -> Tensor:
    """See `kernels.fused.SiluMul`."""
    check_gate_up(gate_up)
    gate_up = with_delta(gate_up, delta)
    gate, up = gate_up.chunk(2, dim=1)
    return silu(gate) * up


def rotary(q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """See `kernels.fused.Rotary`."""
    check_rotary(q, k, cos_sin, positions)
    cos, sin = cos_sin[positions][:, None].chunk(2, dim=-1)  # [T, 1, D / 2]
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


__all__ = ["add_rms_norm", "rms_norm", "rotary", "silu_mul"]
