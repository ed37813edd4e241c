"""Norms, activation and rotary positions on CUDA: one launch each."""

import torch
from torch import Tensor

from kernels.checks import (
    check_delta,
    check_dtype,
    check_gate_up,
    check_norm,
    check_rotary,
    reject,
)
from kernels.fused.delta import with_delta
from kernels.fused.gpu_kernels import norm_kernel, rotary_kernel, silu_mul_kernel
from kernels.overlap import overlap_options
from kernels.sizes import lined, power_of_two

_ELEMENTS = 2048
"""Elements of one program where lines are short."""
_HEADS = 8
"""Heads of one program of `rotary`."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `kernels.fused.RMSNorm`."""
    check_norm(x, weight)
    return _norm(x, None, None, weight, eps)[0]


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, delta: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See `kernels.fused.AddRMSNorm`."""
    check_norm(x, weight, residual)
    x, delta = _alike(x, delta)
    return _norm(x, delta, residual.contiguous(), weight, eps)


def silu_mul(gate_up: Tensor, delta: Tensor | None = None) -> Tensor:
    """See `kernels.fused.SiluMul`."""
    check_gate_up(gate_up)
    check_dtype("gate_up", gate_up)
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((rows, width))
    if out.numel():
        gate_up, delta = _alike(lined(gate_up), delta)
        block = min(1024, power_of_two(width))
        silu_mul_kernel[(rows, -(-width // block))](
            gate_up, gate_up if delta is None else delta, out, gate_up.stride(0),
            WIDTH=width, BLOCK=block, HAS_DELTA=delta is not None, num_warps=4,
            **overlap_options(out.device),
        )  # fmt: skip
    return out


def rotary(q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """See `kernels.fused.Rotary`."""
    check_rotary(q, k, cos_sin, positions)
    check_dtype("q", q)
    if not cos_sin.is_contiguous():
        reject("cos_sin", "contiguous", cos_sin)
    outs = q.new_empty(q.shape), k.new_empty(k.shape)
    rows, q_heads, dim = q.shape
    k_heads = k.shape[1]
    blocks = -(-q_heads // _HEADS) - (-k_heads // _HEADS)
    if rows * blocks * dim:
        q, k = lined(q), lined(k)
        rotary_kernel[(rows, blocks)](
            q, k, *outs, cos_sin, positions, *q.stride()[:2], *k.stride()[:2],
            Q_HEADS=q_heads, K_HEADS=k_heads, DIM=dim,
            BLOCK_H=_HEADS, BLOCK_HALF=power_of_two(dim // 2), num_warps=2,
        )  # fmt: skip
    return outs


def _alike(x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """A contiguous pair for a kernel to add, or else their sum."""
    if delta is None:
        return x, None
    check_delta(x, delta)
    if x.is_contiguous() and delta.is_contiguous():
        return x, delta
    return with_delta(x, delta), None


def _norm(
    x: Tensor, delta: Tensor | None, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return (normed, total); without a residual the total is not written."""
    check_dtype("x", x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = out if residual is None else torch.empty_like(out)
    if not x.numel():
        return out, total
    dim = x.shape[-1]
    lines = x.numel() // dim
    x, inner, outer_stride, inner_stride = _strides(x)
    block_d = power_of_two(dim)
    block_l = max(1, min(_ELEMENTS // block_d, power_of_two(lines)))
    norm_kernel[(-(-lines // block_l),)](
        x, x if delta is None else delta, x if residual is None else residual,
        weight.contiguous(), out, total,
        lines, outer_stride, inner_stride, eps,
        INNER=inner, DIM=dim, BLOCK_L=block_l, BLOCK_D=block_d, HAS_RESIDUAL=residual is not None,
        HAS_DELTA=delta is not None,
        num_warps=max(1, min(16, block_l * block_d // 256)), **overlap_options(x.device),
    )  # fmt: skip
    return out, total


def _strides(x: Tensor) -> tuple[Tensor, int, int, int]:
    """Return x, lines of the inner dimension, and the strides of outer and inner lines."""
    if x.ndim == 3 and x.stride(2) == 1 and not x.is_contiguous():
        return x, x.shape[1], x.stride(0), x.stride(1)
    if x.ndim == 2 and x.stride(1) == 1:
        return x, 1, x.stride(0), 0
    return x.contiguous(), 1, x.shape[-1], 0


__all__ = ["add_rms_norm", "rms_norm", "rotary", "silu_mul"]
