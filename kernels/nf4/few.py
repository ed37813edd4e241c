"""Launches the NF4 product for few rows: checks, grid."""

import torch
from torch import Tensor

from kernels.checks import reject
from kernels.nf4.few_config import FewConfig
from kernels.nf4.few_kernel import nf4_few
from kernels.nf4.gemm import has_room, workspace
from kernels.nf4.packed_weight import PackedNF4
from kernels.nf4.tables import pair_table
from kernels.sizes import power_of_two


def multiply_few(x: Tensor, w: PackedNF4, bias: Tensor | None, config: FewConfig) -> Tensor:
    """Return x W^T + bias as [T, N]: `gemm.multiply` for bfloat16 on Hopper and few rows.

    x [T, K] with adjacent columns, T in 1..MOST_ROWS. Weights take part as
    bfloat16(GAIN * code) * bfloat16(absmax), products in float32.
    """
    _check(x, w)
    return _launch(x, w, bias, config)


def norm_multiply_few(
    x: Tensor,
    residual: Tensor,
    norm: Tensor,
    eps: float,
    w: PackedNF4,
    bias: Tensor | None,
    config: FewConfig,
) -> tuple[Tensor, Tensor]:
    """Return (n W^T + bias, x + residual), n being the RMSNorm of the sum; see `multiply_few`.

    residual [T, K] contiguous, norm [K]. `config` doesn't split columns.
    """
    _check(x, w)
    if residual.shape != x.shape or residual.dtype != x.dtype or not residual.is_contiguous():
        reject("residual", f"contiguous bfloat16 {tuple(x.shape)}", residual)
    if config.split != 1:
        raise ValueError(f"split must be 1 for a norm, got {config.split}")
    total = torch.empty_like(residual)
    return _launch(x, w, bias, config, (residual, norm, total), eps), total


def _launch(
    x: Tensor,
    w: PackedNF4,
    bias: Tensor | None,
    config: FewConfig,
    norm: tuple[Tensor, Tensor, Tensor] | None = None,
    eps: float = 0.0,
) -> Tensor:
    rows, features = x.shape[0], w.rows
    buffers = config.buffers(rows, w.blocks)
    if not buffers:
        raise ValueError(f"config must fit into shared memory, got {config} for {rows} rows")
    groups = -(-features // (16 * config.tiles))
    outputs = groups * -(-rows // 8)
    if config.split > 1 and not has_room(outputs, outputs * config.split * 128 * config.tiles):
        raise ValueError(f"split must be 1 for so large an output, got {config.split}")
    y = x.new_empty(rows, features)
    nf4_few[(min(groups * config.split, config.programs),)](
        x, *(norm or (x, x, x)), w.words, w.scales, pair_table(x.device), bias, y,
        *workspace(x.device),
        rows, features, w.columns, w.scales.shape[1], x.stride(0), w.blocks, groups, eps,
        HAS_NORM=norm is not None, T=config.tiles, BM=power_of_two(rows), PAIRS=config.pairs,
        STEPS=config.steps(w.blocks), BUFFERS=buffers, SPLIT=config.split, W=config.warps,
        HAS_BIAS=bias is not None, launch_pdl=True, num_warps=config.warps,
    )  # fmt: skip
    return y


def _check(x: Tensor, w: PackedNF4) -> None:
    if x.dtype != torch.bfloat16 or x.shape[1] != w.columns or x.stride(1) != 1:
        reject("x", f"bfloat16 [T, {w.columns}] of adjacent columns", x)


__all__ = ["multiply_few", "norm_multiply_few"]
