"""Paged memory as the arena has it: the blocks of several layers in each page."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import AttentionBatch
from launch.bench.attention.timing import DEVICE

Q_HEADS, KV_HEADS, DIM, BLOCK = 32, 8, 128, 16
LAYERS = 4
"""Layers in a page; the launches of a graph go through them as a step's layers do."""
TOKEN_BYTES = 2 * KV_HEADS * DIM * 2
"""Keys and values of one token in one layer."""


@dataclass(frozen=True, kw_only=True)
class Paged:
    """An arena, and as many disjoint sets of sequences as it takes to read beyond the L2 cache."""

    caches: list[tuple[Tensor, Tensor]]
    """By layer: K and V, [pages, KV_HEADS, block, DIM]."""
    batches: list[AttentionBatch]
    """By set."""

    def places(self) -> list[tuple[Tensor, Tensor, AttentionBatch]]:
        """(K, V, batch) of each launch."""
        return [(k, v, batch) for batch in self.batches for k, v in self.caches]


def paged(
    rows: int, contexts: list[int], sets: int, block: int = BLOCK, bound: int | None = None
) -> Paged:
    """Sequences of `rows` rows each on shuffled pages; contexts bounded by `bound` on the host."""
    counts = [-(-context // block) for context in contexts]
    pages = sets * sum(counts)
    size = KV_HEADS * block * DIM
    arena = torch.empty(pages * LAYERS * 2 * size, dtype=torch.bfloat16, device=DEVICE)
    for part in torch.split(arena, 2**28):
        part.normal_()
    shape, strides = (pages, KV_HEADS, block, DIM), (LAYERS * 2 * size, block * DIM, DIM, 1)
    caches = [
        (
            arena.as_strided(shape, strides, 2 * layer * size),
            arena.as_strided(shape, strides, (2 * layer + 1) * size),
        )
        for layer in range(LAYERS)
    ]
    order = torch.randperm(pages).to(torch.int32)
    batches = []
    for number in range(sets):
        mine = order[number * sum(counts) : (number + 1) * sum(counts)]
        table = torch.zeros((len(contexts), max(counts)), dtype=torch.int32)
        for b, part in enumerate(torch.split(mine, counts)):
            table[b, : counts[b]] = part
        batches.append(batch_of(rows, contexts, table, block, bound or max(contexts)))
    return Paged(caches=caches, batches=batches)


def batch_of(
    rows: int, contexts: list[int], table: Tensor, block: int, bound: int
) -> AttentionBatch:
    """The batch of sequences that each add `rows` rows."""
    ends = torch.tensor(contexts, dtype=torch.int64)
    at = (ends[:, None] - rows + torch.arange(rows)).flatten()
    owner = torch.arange(len(contexts)).repeat_interleave(rows)
    return AttentionBatch(
        query_offsets=(torch.arange(len(contexts) + 1) * rows).to(DEVICE, torch.int32),
        context_lens=ends.to(DEVICE, torch.int32),
        page_table=table.to(DEVICE),
        write_pages=table[owner, at // block].to(DEVICE),
        write_slots=(at % block).to(DEVICE, torch.int32),
        max_query=rows,
        max_context=bound,
    )


def queries(rows: int) -> Tensor:
    """bfloat16 [rows, Q_HEADS, DIM]."""
    return torch.randn(rows, Q_HEADS, DIM, dtype=torch.bfloat16, device=DEVICE)
