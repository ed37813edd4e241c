"""Paged attention on CPU: decode rows of like length in one batched product, prefill by sequence.

Keys and values are gathered page by page into [B, Hkv, tokens, D]. What lies outside a context is
cut off, or set to zero where contexts differ: 0 * NaN would be NaN.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from kernels.attention import AttentionBatch
from kernels.attention.buckets import Bucket, buckets_of
from kernels.attention.composed import compose_rotate_attend, compose_rotate_store
from kernels.attention.gather import Geometry, gather
from kernels.checks import check_attention, check_query_rows, check_store
from kernels.fused import cpu as fused
from kernels.sizes import power_of_two

_CACHED = 400_000
"""Elements of K, and of V, gathered for a product: what stays in the caches until it is read."""


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch) -> None:
    """See `kernels.attention.StoreKV`."""
    check_store(k, v, k_cache, v_cache, batch)
    if not k.numel():
        return
    for source, cache in ((k, k_cache), (v, v_cache)):
        geometry = Geometry.of(cache)
        places = batch.memo.get(("store", geometry))
        if places is None:
            places = geometry.token_places(batch.write_pages.long(), batch.write_slots.long())
            batch.memo["store", geometry] = places
        geometry.runs(cache, 1).index_copy_(0, places, source.reshape(-1, geometry.dim))


rotate_store = compose_rotate_store(fused.rms_norm, fused.rotary, store_kv)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int | None,
) -> Tensor:
    """See `kernels.attention.PagedAttention`."""
    check_attention(q, k_cache, v_cache, window)
    if not q.numel():
        return torch.empty_like(q)
    block = k_cache.shape[2]
    key = ("buckets", k_cache.shape[1:], window)
    if key not in batch.memo:
        check_query_rows(q.shape[0], int(batch.query_offsets[-1]))
        limit = _CACHED // (k_cache.shape[1] * k_cache.shape[3])
        found = buckets_of(batch, block, window, limit)
        batch.memo[key] = [(bucket, _bias(bucket, window)) for bucket in found]
    parts: list[tuple[Bucket, Tensor | None]] = batch.memo[key]
    if len(parts) == 1:
        return _attend(q, k_cache, v_cache, *parts[0], scale).to(q.dtype)
    out = torch.empty_like(q)
    for bucket, bias in parts:
        rows = _attend(q[bucket.rows], k_cache, v_cache, bucket, bias, scale)
        out[bucket.rows] = rows.to(q.dtype)
    return out


def _attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    bucket: Bucket,
    bias: Tensor | None,
    scale: float,
) -> Tensor:
    """q [rows of the bucket, Hq, D] -> float32 [rows of the bucket, Hq, D]."""
    k = _visible("keys", k_cache, bucket)  # [B, Hkv, n, D]
    v = _visible("values", v_cache, bucket)
    if bucket.query == 1:
        return _decode(q.float() * scale, k, v, bias)
    out = scaled_dot_product_attention(
        q.float().transpose(0, 1)[None],
        k,
        v,
        attn_mask=bias,
        is_causal=bias is None,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out[0].transpose(0, 1)


def _decode(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    """One row a sequence: q [B, Hq, D], scaled; k, v [B, Hkv, n, D] -> [B, Hq, D]."""
    sequences, heads, dim = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    q = q.reshape(sequences * kv_heads, group, dim)
    if group > 2:  # products of 4 or 8 rows are faster than those of 3 or 7
        q = pad(q, (0, 0, 0, power_of_two(group) - group))
    scores = torch.bmm(q, k.flatten(0, 1).transpose(1, 2))  # [B * Hkv, group, n]
    if bias is not None:
        scores.view(sequences, kv_heads, q.shape[1], -1).add_(bias)
    out = torch.bmm(scores.softmax(-1), v.flatten(0, 1))
    return out[:, :group].reshape(sequences, heads, dim)


def _visible(name: str, cache: Tensor, bucket: Bucket) -> Tensor:
    """Gather the bucket's tokens; hidden ones are cut off, or zero."""
    geometry = Geometry.of(cache)
    places, hidden = bucket.places(geometry)
    tokens = gather(name, cache, geometry, places, bucket.pages.shape[0])
    if hidden is None:
        return tokens[:, :, bucket.low : bucket.high]
    tokens.view(-1, geometry.dim).index_fill_(0, hidden, 0.0)
    return tokens


def _bias(bucket: Bucket, window: int | None) -> Tensor | None:
    """Return what is added to the scores: None where causal order, or nothing, is enough."""
    rows, keys = bucket.query, bucket.high - bucket.low
    if rows == 1:
        return bucket.bias()
    if rows == keys and (window is None or window >= rows):
        return None
    position = torch.arange(keys - rows, keys)[:, None]
    key = torch.arange(keys)[None]
    seen = key <= position if window is None else (key <= position) & (key > position - window)
    return torch.zeros(rows, keys).masked_fill_(~seen, float("-inf"))


rotate_attend = compose_rotate_attend(rotate_store, paged_attention)

__all__ = ["paged_attention", "rotate_attend", "rotate_store", "store_kv"]
