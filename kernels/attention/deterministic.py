"""Paged attention on CPU whose bits depend on a row and its own context alone.

    item     up to TILE rows of one sequence, padded: queries [Hkv, TILE * group, D]
    split    the keys at absolute positions s * SPLIT .. (s + 1) * SPLIT, padded with zeros

Every product has one shape, and the splits of a row are merged in order of position, from 0 to the
last that its item sees. A split that lies wholly outside a row's sight changes no bit of it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.attention import AttentionBatch
from kernels.attention.composed import compose_rotate_attend
from kernels.attention.cpu import rotate_store
from kernels.attention.gather import Geometry, gather
from kernels.checks import check_attention, check_query_rows

TILE = 4
"""Rows of an item."""
SPLIT = 128
"""Keys of a split, rounded up to whole blocks."""
_ITEMS = 32  # items in flight, which bounds the scratch memory


@dataclass(frozen=True, kw_only=True, slots=True)
class Items:
    """Items of like length: I items, n pages each."""

    rows: Tensor
    """int64 [I, TILE], rows of the step; the last row is repeated."""
    position: Tensor
    """int64 [I, TILE], the position of each row in its sequence."""
    pages: Tensor
    """int64 [I, n], whole splits; padded with page 0."""
    first_split: int
    """The first split that any item sees."""


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int | None,
) -> Tensor:
    """See `kernels.attention.PagedAttention`; a row's bits don't depend on the rest of the step."""
    check_attention(q, k_cache, v_cache, window)
    out = torch.empty_like(q)
    if not q.numel():
        return out
    block = k_cache.shape[2]
    key = ("items", block, window)
    if key not in batch.memo:
        check_query_rows(q.shape[0], int(batch.query_offsets[-1]))
        batch.memo[key] = list(_items(batch, block, window))
    found: list[Items] = batch.memo[key]
    for items in found:
        result = _attend(q, k_cache, v_cache, items, scale, window)
        out[items.rows.flatten()] = result.to(q.dtype)
    return out


def _attend(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, items: Items, scale: float, window: int | None
) -> Tensor:
    """Return float32 [I * TILE, Hq, D]."""
    count, heads, dim = items.rows.shape[0], q.shape[1], q.shape[2]
    kv_heads, block = k_cache.shape[1], k_cache.shape[2]
    group, step = heads // kv_heads, _pages_per_split(block)
    # [I * Hkv, TILE * group, D]
    tiles = (q[items.rows.flatten()].float() * scale).view(count, TILE, kv_heads, group, dim)
    tiles = tiles.transpose(1, 2).reshape(count * kv_heads, TILE * group, dim)
    state = _State.empty(tiles)
    for split in range(items.first_split, items.pages.shape[1] // step):
        pages = items.pages[:, split * step : (split + 1) * step]
        key = torch.arange(split * step * block, (split + 1) * step * block)
        seen = key <= items.position[:, :, None]  # [I, TILE, keys]
        if window is not None:
            seen &= key > items.position[:, :, None] - window
        k = _split("keys", k_cache, pages, seen)
        v = _split("values", v_cache, pages, seen)
        state.merge(tiles, k, v, _by_head(seen, kv_heads, group))
    out = state.result().view(count, kv_heads, TILE, group, dim).transpose(1, 2)
    return out.reshape(count * TILE, heads, dim)


@dataclass(slots=True)
class _State:
    """A softmax under way: the peak, the sum of exponentials and the weighted values."""

    peak: Tensor
    total: Tensor
    values: Tensor

    @classmethod
    def empty(cls, tiles: Tensor) -> "_State":
        ones = tiles.new_ones(*tiles.shape[:2], 1)
        return cls(ones * float("-inf"), ones * 0, torch.zeros_like(tiles))

    def merge(self, tiles: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> None:
        scores = torch.bmm(tiles, k.transpose(1, 2)).masked_fill_(hidden, float("-inf"))
        peak = torch.maximum(self.peak, scores.amax(-1, keepdim=True))
        # A row that has seen nothing yet has the peak -inf: exp(-inf - 0) keeps it at zero.
        base = peak.masked_fill(peak == float("-inf"), 0.0)
        weights = (scores - base).exp_()
        fade = (self.peak - base).exp_()
        self.total = self.total * fade + weights.sum(-1, keepdim=True)
        self.values = self.values * fade + torch.bmm(weights, v)
        self.peak = peak

    def result(self) -> Tensor:
        return self.values / self.total


def _split(name: str, cache: Tensor, pages: Tensor, seen: Tensor) -> Tensor:
    """Return float32 [I * Hkv, keys, D]; keys that no row of an item sees are zero."""
    geometry = Geometry.of(cache)
    tokens = gather(name, cache, geometry, geometry.page_places(pages), pages.shape[0])
    tokens.masked_fill_(~seen.any(1)[:, None, :, None], 0.0)
    return tokens.flatten(0, 1)


def _by_head(seen: Tensor, kv_heads: int, group: int) -> Tensor:
    """[I, TILE, keys] -> what is hidden, bool [I * Hkv, TILE * group, keys]."""
    hidden = ~seen.repeat_interleave(group, 1)
    return hidden[:, None].expand(-1, kv_heads, -1, -1).flatten(0, 1)


def _items(batch: AttentionBatch, block: int, window: int | None) -> Iterator[Items]:
    bounds: list[int] = batch.query_offsets.tolist()
    tiles = [  # (end of the keys, sequence, first row, rows)
        (context - (bounds[b + 1] - row) + min(TILE, bounds[b + 1] - row), b, row)
        for b, context in enumerate(batch.context_lens.tolist())
        for row in range(bounds[b], bounds[b + 1], TILE)
    ]
    tiles.sort(reverse=True)
    for at in range(0, len(tiles), _ITEMS):
        yield _pack(batch, bounds, tiles[at : at + _ITEMS], block, window)


def _pack(
    batch: AttentionBatch,
    bounds: list[int],
    tiles: list[tuple[int, int, int]],
    block: int,
    window: int | None,
) -> Items:
    step = _pages_per_split(block)
    width = -(-tiles[0][0] // (step * block)) * step
    pages = torch.zeros((len(tiles), width), dtype=torch.int64)
    rows = torch.empty((len(tiles), TILE), dtype=torch.int64)
    position = torch.empty_like(rows)
    for i, (end, b, row) in enumerate(tiles):
        used = -(-end // block)
        pages[i, :used] = batch.page_table[b, :used]
        last = min(row + TILE, bounds[b + 1]) - 1
        rows[i] = torch.arange(row, row + TILE).clamp_(max=last)
        position[i] = rows[i] - last + end - 1
    lowest = 0 if window is None else max(0, int(position.min()) - window + 1)
    return Items(rows=rows, position=position, pages=pages, first_split=lowest // (step * block))


def _pages_per_split(block: int) -> int:
    return -(-SPLIT // block)


rotate_attend = compose_rotate_attend(rotate_store, paged_attention)

__all__ = ["SPLIT", "TILE", "paged_attention", "rotate_attend"]
