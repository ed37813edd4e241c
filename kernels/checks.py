"""Argument checks that every implementation of an op shares: launch side, metadata only."""

import torch
from torch import Tensor

from kernels.attention import AttentionBatch
from kernels.lora import LoraSegments
from kernels.nf4 import Weight


def require(condition: bool, argument: str, allowed: str, tensor: Tensor) -> None:
    """Raise ValueError naming the argument, what it is and what is allowed."""
    if not condition:
        raise ValueError(
            f"{argument} must be {allowed}, got {tensor.dtype} {tuple(tensor.shape)} with strides "
            f"{tensor.stride()}"
        )


def check_linear(x: Tensor, w: Weight, bias: Tensor | None) -> None:
    """Check the arguments of `linear`."""
    rows, columns = w.shape
    require(
        x.ndim == 2 and x.shape[1] == columns and x.is_floating_point(),
        "x",
        f"floating point [T, {columns}]",
        x,
    )
    if bias is not None:
        require(
            bias.ndim == 1 and bias.shape[0] == rows and bias.is_floating_point(),
            "bias",
            f"floating point [{rows}]",
            bias,
        )


def check_flat(flat: Tensor, blocksize: int) -> None:
    """Check the arguments of `quantize_blocks`, values excepted."""
    require(flat.ndim == 1 and flat.dtype == torch.float32, "flat", "float32 [n]", flat)
    if blocksize < 1:
        raise ValueError(f"blocksize must be >= 1, got {blocksize}")


def check_lora(
    rows: Tensor, name: str, arena: Tensor, descriptors: Tensor, layer: int, num_sites: int
) -> None:
    """Check what `lora_shrink` and `lora_expand_` share."""
    require(rows.ndim == 2 and rows.is_floating_point(), name, "floating point of rank 2", rows)
    require(
        arena.ndim == 1 and arena.dtype == torch.uint8 and arena.is_contiguous(),
        "arena",
        "flat contiguous uint8",
        arena,
    )
    require(
        descriptors.ndim == 1 and descriptors.dtype == torch.int64 and descriptors.is_contiguous(),
        "descriptors",
        "flat contiguous int64",
        descriptors,
    )
    if layer < 0 or num_sites < 1:
        raise ValueError(
            f"layer must be >= 0 and num_sites >= 1, got layer {layer}, num_sites {num_sites}"
        )


def check_expand(
    y: Tensor,
    h: Tensor,
    segments: LoraSegments,
    sites: tuple[int, ...],
    spans: tuple[tuple[int, int], ...],
) -> None:
    """Check what `lora_expand_` has beyond `check_lora`."""
    expected = (len(sites), y.shape[0], segments.max_rank)
    require(tuple(h.shape) == expected and h.dtype == torch.float32, "h", f"float32 {expected}", h)
    if len(spans) != len(sites):
        raise ValueError(f"spans must have one (start, width) a site, got {spans} for {sites}")
    end = 0
    for start, width in sorted(spans):
        if start < end or width < 0 or start + width > y.shape[1]:
            raise ValueError(f"spans must be disjoint and inside 0..{y.shape[1]}, got {spans}")
        end = start + width


def check_caches(heads: Tensor, name: str, k_cache: Tensor, v_cache: Tensor) -> None:
    """Check `heads` [T, H, D] beside the two caches."""
    require(
        k_cache.ndim == 4 and _inner_contiguous(k_cache),
        "k_cache",
        "[P, Hkv, block, D] with contiguous head, token and dim",
        k_cache,
    )
    require(
        v_cache.shape == k_cache.shape
        and v_cache.dtype == k_cache.dtype
        and _inner_contiguous(v_cache),
        "v_cache",
        f"{k_cache.dtype} {tuple(k_cache.shape)} as k_cache, with contiguous head, token and dim",
        v_cache,
    )
    require(
        heads.ndim == 3 and heads.shape[2] == k_cache.shape[3] and heads.dtype == k_cache.dtype,
        name,
        f"{k_cache.dtype} [T, heads, {k_cache.shape[3]}] as the caches",
        heads,
    )


def check_store(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch
) -> None:
    """Check the arguments of `store_kv`."""
    check_caches(k, "k", k_cache, v_cache)
    expected = (batch.write_pages.shape[0], k_cache.shape[1], k_cache.shape[3])
    require(tuple(k.shape) == expected, "k", f"{expected}", k)
    require(v.shape == k.shape and v.dtype == k.dtype, "v", f"{k.dtype} {expected} as k", v)


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


def check_norm(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> None:
    """Check the arguments of `rms_norm` and `add_rms_norm`."""
    require(x.ndim >= 1 and x.is_floating_point(), "x", "floating point [..., D]", x)
    require(weight.shape == x.shape[-1:], "weight", f"[{x.shape[-1]}]", weight)
    if residual is not None:
        require(
            residual.shape == x.shape and residual.dtype == x.dtype,
            "residual",
            f"{x.dtype} {tuple(x.shape)} as x",
            residual,
        )


def check_gate_up(gate_up: Tensor) -> None:
    """Check the argument of `silu_mul`."""
    require(
        gate_up.ndim == 2 and gate_up.shape[1] % 2 == 0 and gate_up.is_floating_point(),
        "gate_up",
        "floating point [T, 2 * I]",
        gate_up,
    )


def check_rotary(q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor) -> None:
    """Check the arguments of `rotary`."""
    require(
        cos_sin.ndim == 2 and cos_sin.shape[1] % 2 == 0 and cos_sin.dtype == torch.float32,
        "cos_sin",
        "float32 [max_positions, even D]",
        cos_sin,
    )
    require(
        positions.ndim == 1 and positions.dtype == torch.int64, "positions", "int64 [T]", positions
    )
    for name, heads in (("q", q), ("k", k)):
        require(
            heads.ndim == 3
            and heads.shape[0] == positions.shape[0]
            and heads.shape[2] == cos_sin.shape[1]
            and heads.is_floating_point(),
            name,
            f"floating point [{positions.shape[0]}, heads, {cos_sin.shape[1]}]",
            heads,
        )


def _inner_contiguous(cache: Tensor) -> bool:
    _, _, block, dim = cache.shape
    return cache.numel() == 0 or cache.stride()[1:] == (block * dim, dim, 1)
