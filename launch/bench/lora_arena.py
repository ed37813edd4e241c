"""Adapters of Llama-3.1-8B's shapes for kernel benchmarks, their rank-rows scattered at random.

Legend: T rows of a step, K in-features, N out-features, r LoRA rank.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.lora import LoraBatch, LoraSegments, LoraTarget
from kernels.lora.tiles import tile_table

INPUTS = (4096, 4096, 4096, 4096, 4096, 4096, 14336)
OUTPUTS = (4096, 1024, 1024, 4096, 14336, 14336, 4096)
NUM_SITES = 7
ITEM = 2  # bytes of a bfloat16


@dataclass(frozen=True, kw_only=True, slots=True)
class Module:
    """One projection with its fused members."""

    name: str
    sites: tuple[int, ...]

    @property
    def width(self) -> int:
        """K."""
        return INPUTS[self.sites[0]]

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """(start, width) of each member in y."""
        widths = [OUTPUTS[site] for site in self.sites]
        return tuple((sum(widths[:i]), width) for i, width in enumerate(widths))

    @property
    def columns(self) -> int:
        """N."""
        return sum(OUTPUTS[site] for site in self.sites)

    def target(self, layer: int) -> LoraTarget:
        """Its sites in a layer."""
        return LoraTarget(layer=layer, sites=self.sites, num_sites=NUM_SITES, spans=self.spans)


MODULES = (
    Module(name="qkv", sites=(0, 1, 2)),
    Module(name="o", sites=(3,)),
    Module(name="gate_up", sites=(4, 5)),
    Module(name="down", sites=(6,)),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapters:
    """Resident adapters on the device."""

    arena: Tensor
    """uint8, flat."""
    descriptors: Tensor
    """int64, flat."""
    numbers: tuple[int, ...]
    """Descriptor number of each adapter."""
    ranks: tuple[int, ...]
    """r of each adapter, the same at all sites."""
    layers: int

    def batch(self, counts: Sequence[int], who: Sequence[int | None]) -> LoraBatch:
        """A step with segments of `counts` rows of adapters `who`; None: base rows."""
        device = self.arena.device
        numbers = [-1 if w is None else self.numbers[w] for w in who]
        chosen = [(n, self.ranks[w]) for n, w in zip(counts, who, strict=True) if w is not None]
        segments = LoraSegments(
            offsets=torch.tensor(np.cumsum([0, *counts]), dtype=torch.int32).to(device),
            descriptors=torch.tensor(numbers).to(device),
            max_rank=max((r for _, r in chosen), default=0),
            max_rows=max((n for n, _ in chosen), default=0),
            # Room for as many tiles as rows, as a captured step has.
            tiles=torch.from_numpy(tile_table(np.array(counts), np.array(numbers), sum(counts))).to(
                device
            ),
        )
        return LoraBatch(arena=self.arena, descriptors=self.descriptors, segments=segments)

    def layer_bytes(self, who: Sequence[int | None]) -> int:
        """Bytes of the rank-rows of one layer of these adapters, each counted once."""
        row = ITEM * (sum(INPUTS) + sum(OUTPUTS))
        return sum(self.ranks[w] * row for w in {w for w in who if w is not None})


def make_adapters(ranks: Sequence[int], layers: int, device: torch.device) -> Adapters:
    """Adapters of these ranks with random values, rank-rows in random order in the arena."""
    widths = [
        ITEM * width
        for rank in ranks
        for _ in range(layers)
        for site in range(NUM_SITES)
        for width in (*[INPUTS[site]] * rank, *[OUTPUTS[site]] * rank)
    ]
    sizes = np.array(widths, dtype=np.int64)
    order = np.random.default_rng(0).permutation(sizes.size)
    offsets = np.empty_like(sizes)
    offsets[order] = np.cumsum(sizes[order]) - sizes[order]
    words, numbers, done = [np.zeros(1, np.int64)], [], 0
    for rank in ranks:
        numbers.append(sum(w.size for w in words))
        head = np.zeros(2 * layers * NUM_SITES, np.int64)
        entries = head.size + 2 * rank * np.arange(layers * NUM_SITES)
        head[0::2] = entries << 16 | rank
        head[1::2] = np.array(random.Random(rank).uniform(0.5, 2.0)).view(np.int64)
        count = 2 * rank * layers * NUM_SITES
        words += [head, offsets[done : done + count]]
        done += count
    return Adapters(
        arena=_random_bytes(int(sizes.sum()), device),
        descriptors=torch.from_numpy(np.concatenate(words)).to(device),
        numbers=tuple(numbers),
        ranks=tuple(ranks),
        layers=layers,
    )


def _random_bytes(size: int, device: torch.device) -> Tensor:
    """bfloat16 noise of standard deviation 0.02."""
    values = torch.empty(size // ITEM, dtype=torch.bfloat16, device=device)
    for piece in torch.split(values, 1 << 28):
        piece.normal_(0.0, 0.02)
    return values.view(torch.uint8)


def deal(rows: int, adapters: int, base: int = 0) -> tuple[list[int], list[int | None]]:
    """Deal rows evenly to adapters 0, 1, ..; `base` rows of none stand first."""
    counts = [
        (rows - base) * (i + 1) // adapters - (rows - base) * i // adapters for i in range(adapters)
    ]
    return [base] * bool(base) + counts, [None] * bool(base) + list(range(adapters))


def zipf(rows: int, adapters: int) -> tuple[list[int], list[int | None]]:
    """Deal rows by a power law of exponent 1, each adapter at least one row."""
    weights = 1.0 / np.arange(1, adapters + 1)
    counts = 1 + np.floor((rows - adapters) * weights / weights.sum()).astype(int)
    counts[0] += rows - counts.sum()
    return counts.tolist(), list(range(adapters))


__all__ = ["MODULES", "Adapters", "Module", "deal", "make_adapters", "zipf"]
