"""Builds paged batches whose unused memory is NaN."""

import random
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kernels.attention import AttentionBatch
from kernels.dispatch import Ops

_LEAD = 16  # elements before the first page, so that storage offsets count
_GAP = 48  # elements between pages, as another layer's blocks would be


@dataclass(kw_only=True)
class Pool:
    """An arena of NaN with the K and V blocks of one layer in it."""

    pages: int
    kv_heads: int
    dim: int
    block: int = 16
    dtype: torch.dtype = torch.float32
    gap: int = _GAP
    k_cache: Tensor = field(init=False)
    v_cache: Tensor = field(init=False)
    arena: Tensor = field(init=False)

    def __post_init__(self) -> None:
        size = self.kv_heads * self.block * self.dim
        stride = 2 * size + self.gap
        self.arena = torch.full((_LEAD + self.pages * stride,), float("nan"), dtype=self.dtype)
        shape = (self.pages, self.kv_heads, self.block, self.dim)
        strides = (stride, self.block * self.dim, self.dim, 1)
        self.k_cache = self.arena.as_strided(shape, strides, _LEAD)
        self.v_cache = self.arena.as_strided(shape, strides, _LEAD + size)


@dataclass(kw_only=True)
class Tokens:
    """Keys and values of one sequence, all its tokens: [n, Hkv, D]."""

    k: Tensor
    v: Tensor

    @classmethod
    def random(cls, count: int, pool: Pool) -> "Tokens":
        shape = (count, pool.kv_heads, pool.dim)
        return cls(k=torch.randn(shape).to(pool.dtype), v=torch.randn(shape).to(pool.dtype))


def make_batch(
    sequences: list[tuple[int, int]], tables: list[list[int]], block: int, extra_width: int = 0
) -> AttentionBatch:
    """Return the batch of (context, rows) sequences whose pages are `tables`."""
    width = max((len(t) for t in tables), default=0) + extra_width
    padded = [table + [0] * (width - len(table)) for table in tables]
    offsets = [0]
    written = []
    for (context, rows), table in zip(sequences, tables, strict=True):
        offsets.append(offsets[-1] + rows)
        written += [(table[t // block], t % block) for t in range(context - rows, context)]
    return AttentionBatch(
        query_offsets=_int32(offsets),
        context_lens=_int32([context for context, _ in sequences]),
        page_table=_int32(padded).view(len(tables), width),
        write_pages=_int32([page for page, _ in written]),
        write_slots=_int32([slot for _, slot in written]),
        max_query=max((rows for _, rows in sequences), default=0),
        max_context=max((context for context, _ in sequences), default=0),
    )


def deal_pages(contexts: list[int], pool: Pool, seed: int = 0) -> list[list[int]]:
    """Return shuffled, disjoint page tables; page 0 stays NaN."""
    free = list(range(1, pool.pages))
    random.Random(seed).shuffle(free)
    return [[free.pop() for _ in range(-(-context // pool.block))] for context in contexts]


def fill(pool: Pool, ops: Ops, tokens: list[Tokens], tables: list[list[int]]) -> None:
    """Store whole sequences, as their earlier steps would have."""
    lengths = [(len(t.k), len(t.k)) for t in tokens]
    batch = make_batch(lengths, tables, pool.block)
    k, v = torch.cat([t.k for t in tokens]), torch.cat([t.v for t in tokens])
    ops.store_kv(k, v, pool.k_cache, pool.v_cache, batch)


def _int32(values: list[int] | list[list[int]]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)
