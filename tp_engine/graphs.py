"""Decode steps as CUDA graphs: captured once for a few sizes, replayed for every step that fits.

A step is padded to the next size with rows that read and store nothing. What changes from step to
step lies in memory that the graph reads: the packed step, page tables, adapter records. So
adapters come and go without a new capture; only a larger LoRA rank than any before needs one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kernels.lora.tiles import tile_table
from tp_engine.step import HostStep, StepLogits

log = logging.getLogger(__name__)

MIN_CONTEXT = 1024
"""Smallest bound of the contexts that a graph is captured for; each next one is four times it."""
MIN_RANK = 16
"""Smallest bound of LoRA ranks; each next one is twice it."""


@dataclass(frozen=True, slots=True)
class GraphKey:
    """What a captured step is for."""

    size: int
    """Sequences, padding included."""
    max_context: int
    max_rank: int
    """0: without adapters."""
    traits: int = 0
    """Of the adapters, as the plan has them."""


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """A graph with the memory that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    packed: Tensor
    logits: StepLogits
    """Of ``size`` rows; the next replay of any graph may overwrite it."""


class DecodeGraphs:
    """The captured steps of one rank. All ranks capture and replay the same ones in step."""

    def __init__(
        self,
        forward: Callable[[HostStep, Tensor], StepLogits],
        *,
        max_num_seqs: int,
        max_model_len: int,
        device: torch.device,
    ) -> None:
        self._forward = forward
        self._sizes = batch_sizes(max_num_seqs)
        self._max_context = max_model_len
        self._spare_slot = max_num_seqs
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._captured: dict[GraphKey, CapturedStep] = {}

    def run(self, host: HostStep) -> StepLogits | None:
        """The logits of a decode step's sequences; None for any other step."""
        key = self.key_of(host)
        if key is None:
            return None
        if key not in self._captured:
            self._capture(key)
        step = self._captured[key]
        padded = _bounded(host.padded(key.size, self._spare_slot), key)
        step.packed.copy_(padded.pack(pinned=True), non_blocking=True)
        step.graph.replay()
        return step.logits.first(host.slots.size)

    def key_of(self, host: HostStep) -> GraphKey | None:
        """The graph for a step, or None if it is not a decode step in which every row samples."""
        rows = host.slots.size
        if host.tokens.size != rows or host.logit_rows.size != rows or rows > self._sizes[-1]:
            return None
        return GraphKey(
            size=next(size for size in self._sizes if size >= rows),
            max_context=bound(host.max_context, MIN_CONTEXT, 4, self._max_context),
            max_rank=bound(host.max_rank, MIN_RANK, 2) if host.max_rank else 0,
            traits=host.traits,
        )

    def capture_all(self, max_rank: int) -> None:
        """Capture every size and context bound, without adapters and for ranks to ``max_rank``."""
        start, free = time.monotonic(), torch.cuda.mem_get_info(self._device)[0]
        ranks = [0, bound(max_rank, MIN_RANK, 2)] if max_rank else [0]
        for context in bounds(MIN_CONTEXT, 4, self._max_context):
            for rank in ranks:
                for size in reversed(self._sizes):  # the largest first: the rest fits in its memory
                    key = GraphKey(size, context, rank)
                    if key not in self._captured:
                        self._capture(key)
        log.info(
            "%d decode graphs captured in %.1f s, %.0f MiB",
            len(self._captured),
            time.monotonic() - start,
            (free - torch.cuda.mem_get_info(self._device)[0]) / 2**20,
        )

    def _capture(self, key: GraphKey) -> None:
        host = _empty_step(key, self._spare_slot)
        packed = host.pack(pinned=False).to(self._device)
        # Once outside of the capture: kernels are compiled and libraries initialised there.
        self._forward(host, packed)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        # Only this thread's calls matter to the capture: nccl's own thread looks after its work.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits = self._forward(host, packed)
        self._captured[key] = CapturedStep(graph, packed, logits)


def batch_sizes(max_num_seqs: int) -> list[int]:
    """Sizes to capture, ascending, the last one at least ``max_num_seqs``."""
    sizes = [size for size in (1, 2, 4, 8, 16, 24, 32) if size < max_num_seqs]
    sizes += range(48, max_num_seqs, 16) if max_num_seqs <= 128 else range(64, max_num_seqs, 32)
    return [*sizes, max_num_seqs]


def bounds(first: int, factor: int, last: int) -> Iterator[int]:
    """``first`` times powers of ``factor`` below ``last``, then ``last``."""
    while first < last:
        yield first
        first *= factor
    yield last


def bound(value: int, first: int, factor: int, last: int | None = None) -> int:
    """The smallest of `bounds` that is not below ``value``."""
    while first < value:
        first *= factor
    return first if last is None else min(first, last)


def _bounded(host: HostStep, key: GraphKey) -> HostStep:
    return replace(
        host,
        max_context=key.max_context,
        max_rank=key.max_rank,
        traits=key.traits,
        max_rows=key.size,
    )


def _empty_step(key: GraphKey, spare_slot: int) -> HostStep:
    """A decode step of padding only."""
    nothing = np.zeros(0, np.int64)
    empty = HostStep(
        tokens=nothing,
        positions=nothing,
        row_slots=nothing,
        logit_rows=nothing,
        logit_slots=nothing,
        descriptors=nothing,
        slots=nothing,
        query_offsets=np.zeros(1, np.int64),
        contexts=nothing,
        segment_offsets=np.zeros(1, np.int64),
        tiles=tile_table(nothing, nothing).ravel(),
        decodes=0,
        max_query=1,
        max_context=key.max_context,
        max_rank=key.max_rank,
        traits=key.traits,
        max_rows=key.size,
    )
    return _bounded(empty.padded(key.size, spare_slot), key)
