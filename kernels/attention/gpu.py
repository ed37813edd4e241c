"""Paged attention on CUDA: launchers of the Triton kernels.

The first sequences, of one row, take the decode kernel as far as the batch counts them, the others
the prefill kernel. Nothing is read back from the device, and grids
follow from host numbers, so that a step can be captured in a CUDA graph; the batch must live as
long as the graph.
"""

import math

import torch
from torch import Tensor

from kernels.attention import AttentionBatch, HeadNorms
from kernels.attention.decode import NewRows, launch_decode
from kernels.attention.hopper import fits_hopper, hopper_tiles, launch_hopper
from kernels.attention.place_kernel import rotate_store_kernel, store_kernel
from kernels.attention.prefill import launch_prefill, tile_count
from kernels.attention.tiles import (
    FUSED_PAIRS,
    HOPPER_ITEMS,
    decode_splits,
    decode_tile,
    hopper_tile,
    prefill_splits,
    prefill_tile,
)
from kernels.checks import (
    check_attention,
    check_dtype,
    check_norm,
    check_rotary,
    check_store,
    reject,
)
from kernels.sizes import lined, power_of_two, shared_room

LOG2_E = math.log2(math.e)
_HEADS = 8
"""Heads of one program of the kernels that fill pages."""


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch) -> None:
    """See `kernels.attention.StoreKV`."""
    check_store(k, v, k_cache, v_cache, batch)
    if not k.numel():
        return
    k, v = lined(k), lined(v)
    rows, heads, dim = k.shape
    block_h = min(_HEADS, power_of_two(heads))
    store_kernel[(rows, -(-heads // block_h))](
        k, v, k_cache, v_cache, batch.write_pages, batch.write_slots,
        *k.stride()[:2], *v.stride()[:2], k_cache.stride(0), v_cache.stride(0),
        HEADS=heads, DIM=dim, PAGE=k_cache.shape[2],
        BLOCK_H=block_h, BLOCK_D=power_of_two(dim), num_warps=2,
    )  # fmt: skip


def rotate_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    batch: AttentionBatch,
    *,
    norms: HeadNorms | None,
) -> Tensor:
    """See `kernels.attention.RotateStore`."""
    _check_heads(q, k, v, k_cache, v_cache, cos_sin, positions, batch, norms)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    rows, q_heads, dim = q.shape
    kv_heads = k.shape[1]
    blocks = -(-q_heads // _HEADS) - 2 * (-kv_heads // _HEADS)
    if not rows * blocks:
        return out
    q, k, v = lined(q), lined(k), lined(v)
    rotate_store_kernel[(rows, blocks)](
        q, k, v, out, k_cache, v_cache, cos_sin, positions, batch.write_pages, batch.write_slots,
        out if norms is None else norms.q, out if norms is None else norms.k,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], k_cache.stride(0), v_cache.stride(0),
        0.0 if norms is None else norms.eps,
        Q_HEADS=q_heads, KV_HEADS=kv_heads, DIM=dim, PAGE=k_cache.shape[2],
        BLOCK_H=_HEADS, BLOCK_HALF=power_of_two(dim // 2), HAS_NORM=norms is not None, num_warps=2,
    )  # fmt: skip
    return out


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int | None,
) -> Tensor:
    """See `kernels.attention.PagedAttention`; also raises ValueError on a scale <= 0."""
    _check_attend(q, k_cache, v_cache, batch, scale, window)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not q.numel():
        return out
    q = lined(q)
    if batch.singles:
        _decode(q, k_cache, v_cache, batch, out, scale, window, None)
    if batch.singles < batch.context_lens.shape[0]:
        _prefill(q, k_cache, v_cache, batch, out, scale, window)
    return out


def rotate_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    batch: AttentionBatch,
    *,
    norms: HeadNorms | None,
    scale: float,
    window: int | None,
) -> Tensor:
    """See `kernels.attention.RotateAttend`: in one launch where few sequences have one row each."""
    if batch.max_query > 1 or batch.context_lens.shape[0] * k_cache.shape[1] > FUSED_PAIRS:
        rotated = rotate_store(q, k, v, k_cache, v_cache, cos_sin, positions, batch, norms=norms)
        return paged_attention(rotated, k_cache, v_cache, batch, scale=scale, window=window)
    _check_heads(q, k, v, k_cache, v_cache, cos_sin, positions, batch, norms)
    _check_attend(q, k_cache, v_cache, batch, scale, window)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if q.numel():
        new = NewRows(k=lined(k), v=lined(v), cos_sin=cos_sin, positions=positions, norms=norms)
        _decode(lined(q), k_cache, v_cache, batch, out, scale, window, new)
    return out


def _decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: AttentionBatch,
    out: Tensor,
    scale: float,
    window: int | None,
    new: NewRows | None,
) -> None:
    pairs = batch.singles * k_cache.shape[1]
    tile = decode_tile(
        pairs, batch.max_context, q.shape[2], q.element_size(), shared_room(q.device)
    )
    splits = decode_splits(pairs, batch.max_context, tile)
    launch_decode(q, k_cache, v_cache, batch, out, scale * LOG2_E, window, tile, splits, new)


def _prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: AttentionBatch,
    out: Tensor,
    scale: float,
    window: int | None,
) -> None:
    kv_heads = k_cache.shape[1]
    group, sequences = q.shape[1] // kv_heads, batch.context_lens.shape[0] - batch.singles
    case = (q, k_cache, v_cache, batch, out, scale * LOG2_E, window)
    if fits_hopper(q, k_cache, v_cache):
        items = hopper_tiles(q.shape[0], sequences, group) * kv_heads
        if items >= HOPPER_ITEMS:
            return launch_hopper(*case, hopper_tile(items))
    tile = prefill_tile(batch.max_query, group, q.shape[2], q.element_size(), shared_room(q.device))
    tiles = tile_count(q.shape[0], sequences, group, tile)
    launch_prefill(*case, tile, prefill_splits(tiles * kv_heads, batch.max_context))


def _check_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    batch: AttentionBatch,
    norms: HeadNorms | None,
) -> None:
    check_store(k, v, k_cache, v_cache, batch)
    check_rotary(q, k, cos_sin, positions)
    check_dtype("q", q)
    if norms is not None:
        for name, heads, weight in (("norms.q", q, norms.q), ("norms.k", k, norms.k)):
            check_norm(heads, weight)
            if not weight.is_contiguous():
                reject(name, "contiguous", weight)
    if not cos_sin.is_contiguous():
        reject("cos_sin", "contiguous", cos_sin)


def _check_attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: AttentionBatch,
    scale: float,
    window: int | None,
) -> None:
    check_attention(q, k_cache, v_cache, window)
    check_dtype("q", q)
    if scale <= 0:
        raise ValueError(f"scale must be > 0, got {scale}")
    if batch.page_table.shape[1] > 1 and batch.page_table.stride(1) != 1:
        reject("page_table", "contiguous in a row", batch.page_table)


__all__ = ["paged_attention", "rotate_attend", "rotate_store", "store_kv"]
