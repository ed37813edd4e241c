"""Steps as CUDA graphs: captured once for a few shapes, replayed for every step that fits.

A step is padded to the next shape with rows that read and store nothing. What changes from step to
step lies in memory that the graph reads: the packed step, page tables, adapter records. So
adapters come and go without a new capture; only a larger LoRA rank than any before needs one.

Decode steps have shapes of their own. Steps with prompts have some up to a thousand rows: the host
takes longer to launch such a step kernel by kernel than the device to compute it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tp_engine.adapters import AdapterTraits
from tp_engine.steps.host_step import HostStep
from tp_engine.steps.step import StepLogits
from tp_engine.steps.step_shape import StepShape, decode_shapes, mixed_shapes

log = logging.getLogger(__name__)

MIN_CONTEXT = 1024
"""Smallest bound of the contexts that a graph is captured for; each next one is four times it."""
MIXED_CONTEXT = 4096
"""Steps with prompts and longer contexts are not captured: the device is slower at them."""
MIN_RANK = 16
"""Smallest bound of LoRA ranks; each next one is twice it."""
LONG_ROWS = (1100, 1500, 2500, 5000)
"""Of steps that are not captured, rows for each range that LoRA kernels are compiled for."""


@dataclass(frozen=True, slots=True)
class GraphKey:
    """What a captured step is for."""

    shape: StepShape
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
    """Of as many rows as the shape says; the next replay of any graph may overwrite it."""


class StepGraphs:
    """The captured steps of one rank. All ranks capture and replay the same ones in step."""

    def __init__(
        self,
        forward: Callable[[HostStep, Tensor], StepLogits],
        *,
        max_num_seqs: int,
        max_model_len: int,
        max_rows: int,
        device: torch.device,
    ) -> None:
        """Capture nothing yet.

        Args:
            max_rows: most rows of a step that can come.
        """
        self._forward = forward
        self._decodes = list(decode_shapes(max_num_seqs))
        self._mixed = list(mixed_shapes(max_num_seqs, max_rows))
        self._max_rows = max_rows
        self._max_context = max_model_len
        self._spare_slot = max_num_seqs
        self._device = device
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self._captured: dict[GraphKey, CapturedStep] = {}

    def run(self, host: HostStep) -> StepLogits | None:
        """The logits of a step's rows that have some; None for a step that no graph is for."""
        key = self.key_of(host)
        if key is None:
            return None
        if key not in self._captured:
            self._capture(key)
        step = self._captured[key]
        step.packed.copy_(self.padded(host, key).pack(pinned=True), non_blocking=True)
        step.graph.replay()
        return step.logits.first(host.logit_rows.size)

    def key_of(self, host: HostStep) -> GraphKey | None:
        """The graph for a step, or None if it is larger than any."""
        mixed = self._mixed if host.max_context <= MIXED_CONTEXT else []
        shape = next((shape for shape in (*self._decodes, *mixed) if host.fits(shape)), None)
        if shape is None:
            return None
        return GraphKey(
            shape=shape,
            max_context=bound(host.max_context, MIN_CONTEXT, 4, self._max_context),
            max_rank=with_bounded_rank(host).max_rank,
            traits=host.traits,
        )

    def padded(self, host: HostStep, key: GraphKey) -> HostStep:
        """The step as the graph for ``key`` reads it."""
        padded = host.padded(key.shape, self._spare_slot)
        return replace(
            padded, max_context=key.max_context, max_rank=key.max_rank, traits=key.traits
        )

    def capture_all(self, max_rank: int, traits: int) -> None:
        """Capture every shape and context bound, without adapters, for ranks to ``max_rank``, and
        for these ranks with ``traits`` if there are any.

        Longer steps with adapters are launched once, for their kernels to be compiled.
        """
        start, free = time.monotonic(), torch.cuda.mem_get_info(self._device)[0]
        known = len(self._captured)
        for key in self.keys(max_rank, traits):
            if key not in self._captured:
                self._capture(key)
        for key in self._longer(max_rank):
            host = self.padded(HostStep.empty(), key)
            self._forward(host, host.pack(pinned=False).to(self._device))
        log.info(
            "%d graphs captured in %.1f s, %.0f MiB",
            len(self._captured) - known,
            time.monotonic() - start,
            (free - torch.cuda.mem_get_info(self._device)[0]) / 2**20,
        )

    def keys(self, max_rank: int, traits: int) -> Iterator[GraphKey]:
        """What `capture_all` captures, the largest shape first: the rest fits in its memory."""
        adapters = [(rank, have) for have in sorted({0, traits}) for rank in _ranks(max_rank)]
        for shape in (*reversed(self._mixed), *reversed(self._decodes)):
            for context in bounds(MIN_CONTEXT, 4, self._max_context):
                if shape.prompts == 0 or context <= MIXED_CONTEXT:
                    yield GraphKey(shape, context, 0)
                    yield from (GraphKey(shape, context, *each) for each in adapters)

    def _longer(self, max_rank: int) -> Iterator[GraphKey]:
        """Steps beyond all shapes; kernels tell a single segment from several.

        The kernel for gains and biases is the same whatever the rows and ranks.
        """
        context = min(MIN_CONTEXT, self._max_context)
        for rank in _ranks(max_rank):
            for rows in {min(rows, self._max_rows) for rows in LONG_ROWS}:
                for shape in (StepShape(rows, 0, 1), StepShape(rows, 1, 1)):
                    yield GraphKey(shape, context, rank)
                    if rank == MIN_RANK:
                        yield GraphKey(shape, context, rank, AdapterTraits.AFFINE)

    def _capture(self, key: GraphKey) -> None:
        host = self.padded(HostStep.empty(), key)
        packed = host.pack(pinned=False).to(self._device)
        # Once outside of the capture: kernels are compiled and libraries initialised there.
        self._forward(host, packed)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        # Only this thread's calls matter to the capture: nccl's own thread looks after its work.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits = self._forward(host, packed)
        kept = replace(logits, logits=_lent(logits.logits))
        self._captured[key] = CapturedStep(graph, packed, kept)


def with_bounded_rank(host: HostStep) -> HostStep:
    """The step with a bound of its LoRA ranks, of which kernels know only few."""
    return replace(host, max_rank=bound(host.max_rank, MIN_RANK, 2)) if host.max_rank else host


def _ranks(most: int) -> Iterator[int]:
    """Bounds of the LoRA ranks to ``most``."""
    return bounds(MIN_RANK, 2, bound(most, MIN_RANK, 2)) if most else iter(())


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


@dataclass(frozen=True, slots=True)
class _Memory:
    """Bytes on the device, as torch takes them from other libraries."""

    __cuda_array_interface__: dict[str, object]


def _lent(tensor: Tensor) -> Tensor:
    """A contiguous tensor's memory without a claim to it, so that later captures use it too."""
    assert tensor.is_contiguous()
    if not tensor.numel():
        return tensor
    memory = {"version": 3, "typestr": "|u1", "shape": (tensor.nbytes,), "strides": None}
    place = _Memory({**memory, "data": (tensor.data_ptr(), False)})
    lent = torch.as_tensor(place, device=tensor.device)
    return lent.view(tensor.dtype).view(tensor.shape)
