"""Paged attention on CUDA: launchers of the Triton kernels.

Sequences of one row take the decode kernel and longer ones the prefill kernel, which also takes
single rows when the batch doesn't count them. Nothing is read back from the device, and grids
follow from host numbers, so that a step can be captured in a CUDA graph; the batch must live as
long as the graph.
"""

import math

import torch
from torch import Tensor

from kernels.attention import AttentionBatch, HeadNorms
from kernels.attention.decode_kernel import decode_kernel
from kernels.attention.place_kernel import rotate_store_kernel, store_kernel
from kernels.attention.prefill_kernel import prefill_kernel
from kernels.attention.tiles import (
    Tile,
    decode_tile,
    merged_at_once,
    power_of_two,
    prefill_tile,
    split_tokens,
)
from kernels.checks import check_attention, check_norm, check_rotary, check_store, reject

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_HEADS = 8
"""Heads of one program of the kernels that fill pages."""


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch) -> None:
    """See `kernels.attention.StoreKV`."""
    check_store(k, v, k_cache, v_cache, batch)
    if not k.numel():
        return
    k, v = _lined(k), _lined(v)
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
    check_store(k, v, k_cache, v_cache, batch)
    check_rotary(q, k, cos_sin, positions)
    _check_dtype("q", q)
    if norms is not None:
        check_norm(q, norms.q)
        check_norm(k, norms.k)
    if not cos_sin.is_contiguous():
        reject("cos_sin", "contiguous", cos_sin)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    rows, q_heads, dim = q.shape
    kv_heads = k.shape[1]
    blocks = -(-q_heads // _HEADS) - 2 * (-kv_heads // _HEADS)
    if not rows * blocks:
        return out
    q, k, v = _lined(q), _lined(k), _lined(v)
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
    check_attention(q, k_cache, v_cache, window)
    _check_dtype("q", q)
    if scale <= 0:
        raise ValueError(f"scale must be > 0, got {scale}")
    if batch.page_table.shape[1] > 1 and batch.page_table.stride(1) != 1:
        reject("page_table", "contiguous in a row", batch.page_table)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not q.numel():
        return out
    q, log2_scale = _lined(q), scale * math.log2(math.e)
    sequences, group = batch.context_lens.shape[0], q.shape[1] // k_cache.shape[1]
    decodes = sequences if batch.max_query <= 1 else batch.decodes
    if decodes:
        tile = decode_tile(group, q.shape[2], q.element_size())
        split = split_tokens(decodes * k_cache.shape[1], batch.max_context)
        launch_decode(q, k_cache, v_cache, batch, out, log2_scale, window, tile, split)
    if decodes < sequences:
        tile = prefill_tile(batch.max_query, group, q.shape[2], q.element_size())
        launch_prefill(q, k_cache, v_cache, batch, out, log2_scale, window, tile)
    return out


def launch_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: AttentionBatch,
    out: Tensor,
    log2_scale: float,
    window: int | None,
    tile: Tile,
    split: int,
) -> None:
    """Write into `out` the rows of the sequences that have one.

    `split` is a multiple of `tile.keys`.
    """
    kv_heads, page = k_cache.shape[1:3]
    group, dim = q.shape[1] // kv_heads, q.shape[2]
    sequences = batch.context_lens.shape[0]
    splits = max(1, -(-batch.max_context // split))
    part, lse, count = _workspace(batch, (sequences, kv_heads, splits, group, dim), q.device)
    decode_kernel[(kv_heads, splits, sequences)](
        q, k_cache, v_cache, out, part, lse, count,
        batch.query_offsets, batch.context_lens, batch.page_table,
        *q.stride()[:2], k_cache.stride(0), v_cache.stride(0), batch.page_table.stride(0),
        log2_scale, window or 0, splits, split,
        GROUP=group, DIM=dim, PAGE=page,
        BLOCK_M=tile.lines, BLOCK_N=tile.keys, BLOCK_D=max(16, power_of_two(dim)),
        BLOCK_G=power_of_two(group), BLOCK_S=merged_at_once(group, dim),
        HAS_SPLITS=splits > 1, HAS_WINDOW=window is not None, PRECISION="ieee",
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def launch_prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: AttentionBatch,
    out: Tensor,
    log2_scale: float,
    window: int | None,
    tile: Tile,
) -> None:
    """Write into `out` the rows of all sequences, or of those with more than one row."""
    kv_heads, page = k_cache.shape[1:3]
    group, dim = q.shape[1] // kv_heads, q.shape[2]
    sequences = batch.context_lens.shape[0]
    tiles = q.shape[0] // (tile.lines // group) + sequences
    prefill_kernel[(tiles, kv_heads)](
        q, k_cache, v_cache, out, batch.query_offsets, batch.context_lens, batch.page_table,
        *q.stride()[:2], k_cache.stride(0), v_cache.stride(0), batch.page_table.stride(0),
        log2_scale, window or 0, sequences,
        GROUP=group, DIM=dim, PAGE=page,
        BLOCK_M=tile.lines, BLOCK_N=tile.keys, BLOCK_D=max(16, power_of_two(dim)),
        BLOCK_B=max(64, power_of_two(sequences)), HAS_DECODES=batch.decodes > 0,
        HAS_WINDOW=window is not None, PRECISION="ieee",
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _workspace(
    batch: AttentionBatch, shape: tuple[int, int, int, int, int], device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Partial results, their sums, and counters that every launch leaves at zero.

    One set a batch: the layers of a step run one after the other.
    """
    key = ("decode workspace", shape)
    if key not in batch.memo:
        size = math.prod(shape[:4]) if shape[2] > 1 else 0
        batch.memo[key] = (
            torch.empty(size * shape[4], dtype=torch.float32, device=device),
            torch.empty(size, dtype=torch.float32, device=device),
            torch.zeros(shape[0] * shape[1], dtype=torch.int32, device=device),
        )
    found: tuple[Tensor, Tensor, Tensor] = batch.memo[key]
    return found


def _lined(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _check_dtype(name: str, x: Tensor) -> None:
    if x.dtype not in _DTYPES:
        reject(name, "float16, bfloat16 or float32", x)


__all__ = ["launch_decode", "launch_prefill", "paged_attention", "rotate_store", "store_kv"]
