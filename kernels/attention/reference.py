"""Paged attention in plain torch, one sequence at a time: the truth for every other
implementation."""

import torch
from torch import Tensor

from kernels.attention import AttentionBatch
from kernels.attention.composed import compose_rotate_attend, compose_rotate_store
from kernels.checks import check_attention, check_query_rows, check_store
from kernels.fused import reference as fused


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch) -> None:
    """See `kernels.attention.StoreKV`."""
    check_store(k, v, k_cache, v_cache, batch)
    real = batch.write_pages >= 0
    pages, slots = batch.write_pages[real].long(), batch.write_slots[real].long()
    k_cache[pages, :, slots] = k[real]
    v_cache[pages, :, slots] = v[real]


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
    out = torch.empty_like(q)
    if q.numel() == 0:
        return out
    bounds: list[int] = batch.query_offsets.tolist()
    check_query_rows(q.shape[0], bounds[-1])
    for b, context in enumerate(batch.context_lens.tolist()):
        start, stop = bounds[b], bounds[b + 1]
        if start == stop or context == 0:
            continue
        first = context - (stop - start)  # position of the first row
        low = 0 if window is None else max(0, first - window + 1)
        keys = _gather(k_cache, batch.page_table[b], low, context)
        values = _gather(v_cache, batch.page_table[b], low, context)
        mask = _mask(first, context, low, window, q.device)
        out[start:stop] = _attend(q[start:stop].float(), keys, values, mask, scale).to(q.dtype)
    return out


def _gather(cache: Tensor, pages: Tensor, low: int, context: int) -> Tensor:
    """Return float32 [Hkv, context - low, D]: tokens low .. context of one sequence."""
    block = cache.shape[2]
    used = pages[low // block : -(-context // block)].long()
    tokens = cache[used].transpose(0, 1).flatten(1, 2)  # [Hkv, tokens, D]
    skipped = low // block * block
    return tokens[:, low - skipped : context - skipped].float()


def _mask(first: int, context: int, low: int, window: int | None, device: torch.device) -> Tensor:
    """Return bool [rows, context - low]: True where a row sees a key."""
    position = torch.arange(first, context, device=device)[:, None]
    key = torch.arange(low, context, device=device)[None]
    seen = key <= position
    return seen if window is None else seen & (key > position - window)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """q [rows, Hq, D], k and v [Hkv, keys, D], mask [rows, keys] -> [rows, Hq, D]."""
    group = q.shape[1] // k.shape[0]
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    scores = (q.transpose(0, 1) @ k.transpose(1, 2)) * scale  # [Hq, rows, keys]
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return (weights @ v).transpose(0, 1)


rotate_attend = compose_rotate_attend(rotate_store, paged_attention)

__all__ = ["paged_attention", "rotate_attend", "rotate_store", "store_kv"]
