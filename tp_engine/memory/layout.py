"""The arena: one block of memory of equal pages, and where keys and values stand in a page.

    arena  | page 0 | page 1 | page 2 | ...            page bytes and count equal on all ranks
    KV page| layer 0: K [head][token][dim] | V ... | layer 1: ... | unused tail
    adapter| rank-rows, each at a multiple of 128 bytes

A rank whose share of the KV heads is smaller leaves the tail of its KV pages unused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sharding import ModelDims, RankCut

MIN_BLOCK_TOKENS = 16
"""Tokens of a KV block, unless an adapter row needs a larger page."""
PAGE_ALIGNMENT = 128
"""Pages start at multiples of this many bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PageLayout:
    """Sizes that all ranks agree on."""

    block_tokens: int
    """Tokens whose keys and values one page holds; a power of two."""
    page_bytes: int
    dtype: torch.dtype
    """Of keys, values and rank-rows."""

    @classmethod
    def choose(
        cls, dims: ModelDims, cuts: Sequence[RankCut], dtype: torch.dtype, longest_row: int
    ) -> PageLayout:
        """The smallest page that holds the heaviest rank's KV block and any one rank-row.

        Args:
            longest_row: bytes of the longest rank-row on any rank.
        """
        block = MIN_BLOCK_TOKENS
        while True:
            heaviest = max(kv_block_bytes(dims, cut, dtype, block) for cut in cuts)
            if heaviest >= longest_row:
                page = -(-heaviest // PAGE_ALIGNMENT) * PAGE_ALIGNMENT
                return cls(block_tokens=block, page_bytes=page, dtype=dtype)
            block *= 2

    def blocks(self, tokens: int) -> int:
        """KV pages for so many tokens."""
        return -(-tokens // self.block_tokens)


def kv_block_bytes(dims: ModelDims, cut: RankCut, dtype: torch.dtype, block_tokens: int) -> int:
    """Bytes of one KV block of all layers on one rank."""
    heads = sum(layer.kv_heads.size for layer in cut.layers)
    return 2 * heads * block_tokens * dims.head_dim * dtype.itemsize


def kv_views(
    arena: Tensor, layout: PageLayout, dims: ModelDims, cut: RankCut
) -> list[tuple[Tensor, Tensor]]:
    """Per layer the key and value caches as strided views of the arena.

    Args:
        arena: uint8 [pages * page_bytes].

    Returns:
        (keys, values) per layer, each [pages, local KV heads, block_tokens, head_dim].
    """
    typed = arena.view(layout.dtype)
    page = layout.page_bytes // layout.dtype.itemsize
    pages = arena.numel() // layout.page_bytes
    head = layout.block_tokens * dims.head_dim
    views, offset = [], 0
    for layer in cut.layers:
        heads = layer.kv_heads.size
        size, stride = (
            (pages, heads, layout.block_tokens, dims.head_dim),
            (page, head, dims.head_dim, 1),
        )
        keys = torch.as_strided(typed, size, stride, offset)
        values = torch.as_strided(typed, size, stride, offset + heads * head)
        views.append((keys, values))
        offset += 2 * heads * head
    return views
