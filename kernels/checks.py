"""Argument checks that every implementation of an op shares: launch side, metadata only."""

from typing import NoReturn

import torch
from torch import Tensor

from kernels.attention import AttentionBatch
from kernels.lora import LoraSegments
from kernels.nf4 import Weight


def reject(argument: str, allowed: str, tensor: Tensor) -> NoReturn:
    """Raise ValueError naming the argument, what it is and what is allowed."""
    raise ValueError(
        f"{argument} must be {allowed}, got {tensor.dtype} {tuple(tensor.shape)} with strides "
        f"{tensor.stride()}"
    )


def check_linear(x: Tensor, w: Weight, bias: Tensor | None) -> None:
    """Check the arguments of `linear`."""
    rows, columns = w.shape
    if x.ndim != 2 or x.shape[1] != columns or not x.is_floating_point():
        reject("x", f"floating point [T, {columns}]", x)
    if bias is not None and (bias.shape != (rows,) or not bias.is_floating_point()):
        reject("bias", f"floating point [{rows}]", bias)


def check_flat(flat: Tensor, blocksize: int) -> None:
    """Check the arguments of `quantize_blocks`."""
    if flat.ndim != 1 or flat.dtype != torch.float32:
        reject("flat", "float32 [n]", flat)
    if blocksize < 1:
        raise ValueError(f"blocksize must be >= 1, got {blocksize}")
    if not bool(torch.isfinite(flat).all()):
        raise ValueError("flat must be finite, got NaN or infinity")


def check_lora(
    rows: Tensor, name: str, arena: Tensor, descriptors: Tensor, layer: int, num_sites: int
) -> None:
    """Check what `lora_shrink` and `lora_expand_` share."""
    if rows.ndim != 2 or not rows.is_floating_point():
        reject(name, "floating point of rank 2", rows)
    if arena.ndim != 1 or arena.dtype != torch.uint8 or not arena.is_contiguous():
        reject("arena", "flat contiguous uint8", arena)
    if descriptors.ndim != 1 or descriptors.dtype != torch.int64 or not descriptors.is_contiguous():
        reject("descriptors", "flat contiguous int64", descriptors)
    if layer < 0 or num_sites < 1:
        raise ValueError(
            f"layer must be >= 0 and num_sites >= 1, got layer {layer}, num_sites {num_sites}"
        )


def check_sites(sites: tuple[int, ...], num_sites: int) -> None:
    """Check the sites of a LoRA op."""
    if any(not 0 <= site < num_sites for site in sites):
        raise ValueError(f"sites must be in [0, {num_sites}), got {sites}")


def check_expand(
    y: Tensor,
    h: Tensor,
    segments: LoraSegments,
    sites: tuple[int, ...],
    spans: tuple[tuple[int, int], ...],
) -> None:
    """Check what `lora_expand_` has beyond `check_lora`."""
    expected = (len(sites), y.shape[0], segments.max_rank)
    if h.shape != expected or h.dtype != torch.float32:
        reject("h", f"float32 {expected}", h)
    check_spans(y, sites, spans)


def check_spans(y: Tensor, sites: tuple[int, ...], spans: tuple[tuple[int, int], ...]) -> None:
    """Check where in y the sites of a LoRA op write."""
    if len(spans) != len(sites):
        raise ValueError(f"spans must have one (start, width) a site, got {spans} for {sites}")
    end = 0
    for start, width in sorted(spans):
        if start < end or width < 0 or start + width > y.shape[1]:
            raise ValueError(f"spans must be disjoint and inside 0..{y.shape[1]}, got {spans}")
        end = start + width


def check_affine(
    y: Tensor,
    sites: tuple[int, ...],
    spans: tuple[tuple[int, int], ...],
    bias: Tensor | None,
) -> None:
    """Check what `lora_affine_` has beyond `check_lora`."""
    check_spans(y, sites, spans)
    if bias is not None and (bias.shape != (y.shape[1],) or not bias.is_floating_point()):
        reject("bias", f"floating point [{y.shape[1]}]", bias)


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
    if positions.ndim != 1 or positions.dtype != torch.int64:
        reject("positions", "int64 [T]", positions)
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


def _inner_contiguous(cache: Tensor) -> bool:
    _, _, block, dim = cache.shape
    return cache.stride()[1:] == (block * dim, dim, 1) or cache.numel() == 0
