"""Address arithmetic of paged caches on CPU: head-major gathers and scattered writes in one copy.

A cache [P, Hkv, block, D] is seen as overlapping runs [places, length], one at every multiple of a
unit that divides all strides, so that `index_select` finds the tokens of (page, head) directly.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.scratch import SCRATCH


@dataclass(frozen=True, slots=True)
class Geometry:
    """Strides of a cache in elements; equal for all layers of a model."""

    page: int
    """Elements from a page to the next."""
    heads: int
    """Hkv."""
    block: int
    """Tokens a page."""
    dim: int
    """D."""

    @classmethod
    def of(cls, cache: Tensor) -> "Geometry":
        """Read the geometry of a cache [P, Hkv, block, D]."""
        _, heads, block, dim = cache.shape
        return cls(cache.stride(0), heads, block, dim)

    def runs(self, cache: Tensor, tokens: int) -> Tensor:
        """Return the cache as runs of `tokens` tokens of one head: [places, tokens * D]."""
        unit, length = self.unit(tokens), tokens * self.dim
        last = (cache.shape[0] - 1) * self.page + self.heads * self.block * self.dim - length
        return cache.as_strided((last // unit + 1, length), (unit, 1), cache.storage_offset())

    def unit(self, tokens: int) -> int:
        """Elements from a run to the next."""
        return math.gcd(self.page, tokens * self.dim)

    def page_places(self, pages: Tensor) -> Tensor:
        """int64 pages [B, n] -> places of whole (page, head) runs, [B * Hkv * n], head-major."""
        unit = self.unit(self.block)
        heads = torch.arange(self.heads) * (self.block * self.dim // unit)
        return (pages[:, None, :] * (self.page // unit) + heads[:, None]).flatten()

    def token_places(self, pages: Tensor, slots: Tensor) -> Tensor:
        """int64 pages, slots [T] -> places of single-token runs, [T * Hkv]."""
        unit = self.unit(1)
        heads = torch.arange(self.heads) * (self.block * self.dim // unit)
        start = pages * (self.page // unit) + slots * (self.dim // unit)
        return (start[:, None] + heads).flatten()


def gather(name: str, cache: Tensor, geometry: Geometry, places: Tensor, count: int) -> Tensor:
    """Return float32 [count, Hkv, n * block, D] from `page_places`, valid until the next `name`."""
    length = geometry.block * geometry.dim
    rows = SCRATCH.take(name, places.shape[0], length, cache.dtype)
    torch.index_select(geometry.runs(cache, geometry.block), 0, places, out=rows)
    return rows.float().view(count, geometry.heads, -1, geometry.dim)


__all__ = ["Geometry", "gather"]
