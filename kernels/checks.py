"""Argument checks that every implementation of an op shares: launch side, metadata only."""

from typing import NoReturn

import torch
from torch import Tensor

from kernels.attention import AttentionBatch
from kernels.lora import LoraBatch, LoraTarget
from kernels.nf4 import Weight


def reject(argument: str, allowed: str, tensor: Tensor) -> NoReturn:
    """Raise ValueError naming the argument, what it is and what is allowed."""
    raise ValueError(
        f"{argument} must be {allowed}, got {tensor.dtype} {tuple(tensor.shape)} with strides "
        f"{tensor.stride()}"
    )


def check_dtype(name: str, x: Tensor) -> None:
    """Check that the CUDA kernels know the dtype of values."""
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        reject(name, "float16, bfloat16 or float32", x)


def check_lined(name: str, x: Tensor) -> None:
    """Check that rows which a kernel writes have adjacent elements."""
    if x.numel() and x.stride(-1) != 1:
        reject(name, "of contiguous rows", x)


def check_linear(x: Tensor, w: Weight, bias: Tensor | None) -> None:
    """Check the arguments of `linear`."""
    rows, columns = w.shape
    if x.ndim != 2 or x.shape[1] != columns or not x.is_floating_point():
        reject("x", f"floating point [T, {columns}]", x)
    if bias is not None:
        _check_bias(bias, rows)


def check_flat(flat: Tensor, blocksize: int) -> None:
    """Check the arguments of `quantize_blocks`."""
    if flat.ndim != 1 or flat.dtype != torch.float32:
        reject("flat", "float32 [n]", flat)
    if blocksize < 1:
        raise ValueError(f"blocksize must be >= 1, got {blocksize}")
    if not bool(torch.isfinite(flat).all()):
        raise ValueError("flat must be finite, got NaN or infinity")


def check_lora_input(x: Tensor) -> None:
    """Check rows that a LoRA op projects."""
    if x.ndim != 2 or not x.is_floating_point():
        reject("x", "floating point [T, K]", x)


def check_lora_output(y: Tensor, target: LoraTarget) -> None:
    """Check rows that a LoRA op writes to."""
    if y.ndim != 2 or not y.is_floating_point() or y.shape[1] < target.columns:
        reject("y", f"floating point [T, {target.columns} or more]", y)


def check_expand(y: Tensor, h: Tensor, batch: LoraBatch, target: LoraTarget) -> None:
    """Check the arguments of `lora_expand_`."""
    check_lora_output(y, target)
    expected = (len(target.sites), y.shape[0], batch.segments.max_rank)
    if h.shape != expected or h.dtype != torch.float32:
        reject("h", f"float32 {expected}", h)


def check_affine(y: Tensor, target: LoraTarget, bias: Tensor | None) -> None:
    """Check the arguments of `lora_affine_`."""
    check_lora_output(y, target)
    if bias is not None:
        _check_bias(bias, y.shape[1])


def check_caches(heads: Tensor, name: str, k_cache: Tensor, v_cache: Tensor) -> None:
    """Check `heads` [T, H, D] beside the two caches."""
    if k_cache.ndim != 4 or not _inner_contiguous(k_cache):
        reject("k_cache", "[P, Hkv, block, D] with contiguous head, token and dim", k_cache)
    if (
        v_cache.shape != k_cache.shape
        or v_cache.dtype != k_cache.dtype
        or not _inner_contiguous(v_cache)
    ):
        allowed = f"{k_cache.dtype} {tuple(k_cache.shape)} with contiguous head, token and dim"
        reject("v_cache", allowed, v_cache)
    dim = k_cache.shape[3]
    if heads.ndim != 3 or heads.shape[2] != dim or heads.dtype != k_cache.dtype:
        reject(name, f"{k_cache.dtype} [T, heads, {dim}] as the caches", heads)


def check_store(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch
) -> None:
    """Check the arguments of `store_kv`."""
    check_caches(k, "k", k_cache, v_cache)
    if k.shape[:2] != (batch.write_pages.shape[0], k_cache.shape[1]):
        reject("k", f"[{batch.write_pages.shape[0]}, {k_cache.shape[1]}, D]", k)
    if v.shape != k.shape or v.dtype != k.dtype:
        reject("v", f"{k.dtype} {tuple(k.shape)} as k", v)


def check_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, window: int | None) -> None:
    """Check the arguments of `paged_attention`."""
    check_caches(q, "q", k_cache, v_cache)
    kv_heads = k_cache.shape[1]
    if q.shape[1] and (not kv_heads or q.shape[1] % kv_heads):
        raise ValueError(
            f"q must have a multiple of the {kv_heads} KV heads of k_cache, got {q.shape[1]} heads"
        )
    if window is not None and window < 1:
        raise ValueError(f"window must be >= 1 or None, got {window}")


def check_query_rows(rows: int, covered: int) -> None:
    """Check that the sequences of a batch cover all rows of q."""
    if rows != covered:
        raise ValueError(f"q must have {covered} rows as batch.query_offsets, got {rows}")


def check_segment_rows(name: str, rows: int, covered: int) -> None:
    """Check that the segments cover all rows."""
    if rows != covered:
        raise ValueError(f"{name} must have {covered} rows as segments.offsets, got {rows}")


def check_norm(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> None:
    """Check the arguments of `rms_norm` and `add_rms_norm`."""
    if x.ndim < 1 or not x.is_floating_point():
        reject("x", "floating point [..., D]", x)
    if weight.shape != x.shape[-1:] or not weight.is_floating_point():
        reject("weight", f"floating point [{x.shape[-1]}]", weight)
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        reject("residual", f"{x.dtype} {tuple(x.shape)} as x", residual)


def check_delta(x: Tensor, delta: Tensor) -> None:
    """Check what is to be added to a tensor before an op reads it."""
    if delta.shape != x.shape or delta.dtype != x.dtype:
        reject("delta", f"{x.dtype} {tuple(x.shape)} as what it is added to", delta)


def check_gate_up(gate_up: Tensor) -> None:
    """Check the argument of `silu_mul`."""
    if gate_up.ndim != 2 or gate_up.shape[1] % 2 or not gate_up.is_floating_point():
        reject("gate_up", "floating point [T, 2 * I]", gate_up)


def check_rotary(q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor) -> None:
    """Check the arguments of `rotary`."""
    if cos_sin.ndim != 2 or cos_sin.shape[1] % 2 or cos_sin.dtype != torch.float32:
        reject("cos_sin", "float32 [max_positions, even D]", cos_sin)
    if positions.ndim != 1 or positions.dtype != torch.int64 or not positions.is_contiguous():
        reject("positions", "contiguous int64 [T]", positions)
    rows, dim = positions.shape[0], cos_sin.shape[1]
    for name, heads in (("q", q), ("k", k)):
        if (
            heads.ndim != 3
            or heads.shape[0] != rows
            or heads.shape[2] != dim
            or heads.dtype != q.dtype
            or not heads.is_floating_point()
        ):
            reject(name, f"floating point [{rows}, heads, {dim}], one dtype", heads)


def _check_bias(bias: Tensor, size: int) -> None:
    if bias.shape != (size,) or not bias.is_floating_point() or not bias.is_contiguous():
        reject("bias", f"contiguous floating point [{size}]", bias)


def _inner_contiguous(cache: Tensor) -> bool:
    _, _, block, dim = cache.shape
    return cache.stride()[1:] == (block * dim, dim, 1) or cache.numel() == 0
