"""Norms, activation and rotary positions on CPU: the reference's arithmetic in fewer calls.

Each result is made of exact elementwise steps and of sums along one row, so it doesn't depend on
the other rows; float32 results equal the reference bit for bit.
"""

import torch
from torch import Tensor
from torch.nn.functional import silu

from kernels.checks import check_gate_up, check_norm, check_rotary
from kernels.fused.delta import with_delta


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `kernels.fused.RMSNorm`."""
    check_norm(x, weight)
    return _normalise(x, weight, eps)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, delta: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See `kernels.fused.AddRMSNorm`."""
    check_norm(x, weight, residual)
    total = with_delta(x, delta) + residual
    return _normalise(total, weight, eps), total


def silu_mul(gate_up: Tensor, delta: Tensor | None = None) -> Tensor:
    """See `kernels.fused.SiluMul`."""
    check_gate_up(gate_up)
    gate_up = with_delta(gate_up, delta)
    half = gate_up.shape[1] // 2
    return silu(gate_up[:, :half]).mul_(gate_up[:, half:])


def rotary(q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """See `kernels.fused.Rotary`."""
    check_rotary(q, k, cos_sin, positions)
    rows, heads, dim = q.shape
    cos, sin = cos_sin.index_select(0, positions).view(rows, 1, 2, dim // 2).unbind(2)
    both = torch.cat((q, k), dim=1)  # [T, Hq + Hkv, D]
    a, b = both.float().view(rows, both.shape[1], 2, dim // 2).unbind(2)
    turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=2)
    turned = turned.view(both.shape).to(q.dtype)
    return turned[:, :heads], turned[:, heads:]


def _normalise(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    factor = (wide * wide).mean(-1, keepdim=True).add_(eps).rsqrt_()
    normed = wide * factor
    if x.dtype == weight.dtype == torch.float32:
        return normed.mul_(weight)
    return (weight * normed.to(x.dtype)).to(x.dtype)


__all__ = ["add_rms_norm", "rms_norm", "rotary", "silu_mul"]
