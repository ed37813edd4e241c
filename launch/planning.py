"""How many adapters and tokens a rank's memory holds, before anything is loaded.

Sizes of pages, rows and shards come from the functions that the engine itself uses; the weights and
scratch of a step are the estimate that its start checks against (`launch.preflight.memory`).

Legend: kind = adapters of one LoRA rank and one set of modules (`launch.adapter_kinds`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from launch.adapter_kinds import AdapterKind, KindNeed, kind_need
from launch.preflight import MemoryNeed, estimate_memory
from sharding import cut_model
from tp_engine.adapters import longest_row_bytes
from tp_engine.config import EngineConfig
from tp_engine.memory import PageLayout
from tp_engine.models import ModelSpec
from tp_engine.tiers.room import words_a_page

CERTAINTY = 0.99
"""Of the draw of adapters that must fit."""
MOST_DRAWN = 4096
"""Adapters at once that are tried at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Capacity:
    """What fits on each rank."""

    need: MemoryNeed
    """Of the base."""
    arena_bytes: int
    layout: PageLayout
    pages: int
    kinds: tuple[KindNeed, ...]
    drawn: int
    """Adapters, drawn as the profile says, that fit at once with `CERTAINTY` beside the tokens
    that were asked for."""
    drawn_pages: int
    """Pages that they take at most with that certainty."""

    @property
    def kv_tokens(self) -> int:
        """Tokens that fit when no adapter is resident."""
        return self.pages * self.layout.block_tokens

    @property
    def kv_tokens_left(self) -> int:
        """Tokens that fit beside the adapters that were drawn."""
        return (self.pages - self.drawn_pages) * self.layout.block_tokens

    @property
    def host_bytes(self) -> int:
        """Memory of the host, a rank, for the page images of all adapters of the profile."""
        return sum(need.kind.count * need.allocated for need in self.kinds)

    @property
    def disk_bytes(self) -> int:
        """Of the store, for one revision of each adapter, saved in the type that is served."""
        return sum(need.kind.count * need.whole_bytes for need in self.kinds)


def plan_capacity(
    spec: ModelSpec,
    config: EngineConfig,
    world: int,
    *,
    memory: int,
    kinds: Sequence[AdapterKind],
    kv_tokens: int,
) -> Capacity:
    """What ``world`` ranks hold.

    Args:
        config: resolved, as the engine would be started.
        memory: bytes of a GPU, of which ``gpu_memory_utilization`` is used.
        kinds: of adapters.
        kv_tokens: tokens that must have room beside the adapters.

    Raises:
        ValueError: the base leaves no room for one page.
    """
    assert config.max_model_len is not None and config.max_num_batched_tokens is not None
    dims, dtype = spec.dims(), getattr(torch, config.dtype)
    cuts = cut_model(dims, world)
    need = estimate_memory(
        dims,
        world,
        element_bytes=dtype.itemsize,
        nf4=config.quantize is not None or spec.quantization is not None,
        dense_copies=False,
        tied=spec.tie_word_embeddings,
        max_model_len=config.max_model_len,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
    )
    layout = PageLayout.choose(dims, cuts, dtype, longest_row_bytes(dims, cuts, dtype))
    arena, page = config.arena_bytes, layout.page_bytes
    if arena is None:
        arena = int(memory * config.gpu_memory_utilization) - need.total(0) + need.sequence
        page += words_a_page(dims, layout) * torch.int64.itemsize
    pages = config.num_pages or arena // page
    if pages < 1:
        raise ValueError(
            f"{memory} bytes leave {arena} for the arena, of which a page takes {page}: more "
            "memory, more ranks or --quantize nf4 are needed"
        )
    needs = tuple(kind_need(kind, spec, cuts, layout) for kind in kinds)
    room = pages - layout.blocks(kv_tokens)
    drawn, drawn_pages = most_drawn(
        [each.pages for each in needs], [each.kind.count for each in needs], room
    )
    return Capacity(
        need=need,
        arena_bytes=pages * layout.page_bytes,
        layout=layout,
        pages=pages,
        kinds=needs,
        drawn=drawn,
        drawn_pages=drawn_pages,
    )


def most_drawn(pages: Sequence[int], counts: Sequence[int], room: int) -> tuple[int, int]:
    """The most adapters, drawn one by one without regard to those before, that fit.

    Args:
        pages: of an adapter of each kind.
        counts: how many of each kind there are, as weights and as the limit of all.
        room: pages.

    Returns:
        (adapters, pages that they take with `CERTAINTY`), exactly: by convolution, not sampling.
    """
    if not counts or room <= 0:
        return 0, 0
    single: Mapping[int, float] = {
        size: sum(c for p, c in zip(pages, counts, strict=True) if p == size) / sum(counts)
        for size in set(pages)
    }
    chances: npt.NDArray[np.float64] = np.zeros(room + 1)
    chances[0] = 1.0  # of taking so many pages; what takes more than there is room is left out
    fits = (0, 0)
    for drawn in range(1, min(sum(counts), MOST_DRAWN) + 1):
        after = np.zeros_like(chances)
        for size, chance in single.items():
            if size <= room:
                after[size:] += chance * chances[: room + 1 - size]
        chances = after
        total = np.cumsum(chances)
        if total[-1] < CERTAINTY:
            break
        fits = drawn, int(np.searchsorted(total, CERTAINTY))
    return fits


def as_json(capacity: Capacity) -> dict[str, object]:
    """For programs; bytes are a rank's."""
    return {
        "weights_bytes": capacity.need.weights,
        "scratch_bytes": capacity.need.scratch,
        "arena_bytes": capacity.arena_bytes,
        "page_bytes": capacity.layout.page_bytes,
        "pages": capacity.pages,
        "tokens_per_page": capacity.layout.block_tokens,
        "kv_tokens": capacity.kv_tokens,
        "adapters": [
            {
                "rank": need.kind.rank,
                "count": need.kind.count,
                "targets": list(need.kind.targets),
                "dora": need.kind.dora,
                "bias": need.kind.bias,
                "saved": list(need.kind.saved),
                "tokens": need.kind.tokens,
                "row_bytes": need.row_bytes,
                "pages": need.pages,
                "allocated_bytes": need.allocated,
            }
            for need in capacity.kinds
        ],
        "adapters_at_once": capacity.drawn,
        "kv_tokens_beside_them": capacity.kv_tokens_left,
        "host_bytes": capacity.host_bytes,
        "disk_bytes": capacity.disk_bytes,
    }
