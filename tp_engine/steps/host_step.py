"""A step on the host: flat arrays made from a plan, padded if need be, packed for one copy.

Legend: T rows, B sequences, R sampled rows, G adapter segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.lora.tiles import tile_table
from tp_engine.steps.plan import NO_ADAPTER, IntArray, StepPlan
from tp_engine.steps.step_shape import StepShape

WIDE = ("tokens", "positions", "row_slots", "logit_rows", "logit_slots", "descriptors", "slots")
"""Fields that travel as int64."""
NARROW = ("tiles", "query_offsets", "contexts", "segment_offsets")
"""Fields that travel as int32."""
_ALIGNMENT = 16
"""Bytes. Each field of a packed step begins at a multiple: Triton compiles a kernel anew for a
pointer that does not, and with that for almost every combination of sizes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostStep:
    """A step as the host knows it."""

    tokens: IntArray
    """[T], negative where the slot has the token."""
    positions: IntArray
    """[T]."""
    row_slots: IntArray
    """[T]."""
    logit_rows: IntArray
    """[R]."""
    logit_slots: IntArray
    """[R]."""
    descriptors: IntArray
    """[G]."""
    slots: IntArray
    """[B]."""
    query_offsets: IntArray
    """[B + 1]."""
    contexts: IntArray
    """[B]."""
    segment_offsets: IntArray
    """[G + 1]."""
    tiles: npt.NDArray[np.int32]
    """[C * 4], the segments as `LoraSegments.tiles` has them."""
    decodes: int
    """Leading sequences of one row."""
    max_query: int
    max_context: int
    """Largest context, or a bound of it."""
    max_rank: int
    """Largest LoRA rank, or a bound of it; 0 without adapters."""
    traits: int
    """Bits of `AdapterTraits`."""
    max_rows: int
    """Most rows of an adapter's segment."""
    all_sample: bool
    """Every row has logits, in order: of decode steps, as a rule."""

    @classmethod
    def of(cls, plan: StepPlan) -> HostStep:
        """Spell out what a plan says."""
        slots, rows, contexts, samples = plan.sequences.reshape(-1, 4).T
        ends = np.cumsum(rows)
        logit_rows = ends[samples == 1] - 1
        lengths, descriptors = plan.segments.reshape(-1, 2).T
        several = np.flatnonzero(rows > 1)
        return cls(
            tokens=plan.tokens,
            # Row t of a sequence that ends before row e with context c has position c - (e - t).
            positions=np.arange(ends[-1]) + np.repeat(contexts - ends, rows),
            row_slots=np.repeat(slots, rows),
            logit_rows=logit_rows,
            logit_slots=slots[samples == 1],
            descriptors=descriptors,
            slots=slots,
            query_offsets=np.concatenate([[0], ends]),
            contexts=contexts,
            segment_offsets=np.concatenate([[0], np.cumsum(lengths)]),
            tiles=tile_table(lengths, descriptors).ravel(),
            decodes=int(several[0]) if several.size else rows.size,
            max_query=int(rows.max()),
            max_context=int(contexts.max()),
            max_rank=plan.max_rank,
            traits=plan.traits,
            max_rows=int(lengths[descriptors >= 0].max(initial=0)),
            all_sample=logit_rows.size == ends[-1],
        )

    @classmethod
    def empty(cls) -> HostStep:
        """A step without rows, which padding can make any captured step of."""
        nothing = np.zeros(0, np.int64)
        return cls(
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
            max_query=0,
            max_context=0,
            max_rank=0,
            traits=0,
            max_rows=0,
            all_sample=True,
        )

    def fits(self, shape: StepShape) -> bool:
        """Whether `padded` can make the step so large."""
        prompts = self.slots.size - self.decodes
        small = self.tokens.size <= shape.rows and self.decodes <= shape.decodes
        return small and prompts <= shape.prompts and (self.all_sample or shape.prompts > 0)

    def padded(self, shape: StepShape, spare_slot: int) -> HostStep:
        """A step of that shape that says the same.

        What is added are rows and sequences without a context, in a slot that has no pages, and
        empty segments: nothing is stored or read for them. Bounds are the shape's, but for those of
        context and rank.
        """
        used, at = self.tokens.size, self.decodes
        more, gap = shape.rows - used, shape.decodes - at
        behind = shape.prompts - (self.slots.size - at)
        # Of a decode step each added sequence has one of the added rows, else it has none.
        steps = np.arange(1, gap + 1) if shape.prompts == 0 else np.zeros(gap, np.int64)
        starts = [self.query_offsets[: at + 1], at + steps, self.query_offsets[at + 1 :]]
        offsets = np.full(shape.sequences + 1, used, np.int64)
        offsets[: self.segment_offsets.size] = self.segment_offsets
        offsets[-1] = shape.rows  # the last segment holds the added rows
        descriptors = _extend(self.descriptors, shape.sequences - self.descriptors.size, NO_ADAPTER)
        logits = shape.logits - self.logit_rows.size
        return replace(
            self,
            tokens=_extend(self.tokens, more, 0),
            positions=_extend(self.positions, more, 0),
            row_slots=_extend(self.row_slots, more, spare_slot),
            logit_rows=np.concatenate(
                [self.logit_rows, np.minimum(used + np.arange(logits), shape.rows - 1)]
            ),
            logit_slots=_extend(self.logit_slots, logits, spare_slot),
            descriptors=descriptors,
            slots=_spread(self.slots, at, gap, behind, spare_slot),
            query_offsets=np.concatenate([*starts, np.full(behind, used)]),
            contexts=_spread(self.contexts, at, gap, behind, 0),
            segment_offsets=offsets,
            tiles=tile_table(np.diff(offsets), descriptors, shape.tiles).ravel(),
            decodes=shape.decodes,
            max_query=shape.max_query,
            max_rows=shape.rows,
            all_sample=shape.prompts == 0,
        )

    def pack(self, *, pinned: bool) -> Tensor:
        """All arrays in one uint8 tensor on the host, in the order that `unpack` expects."""
        wide = _joined([getattr(self, name) for name in WIDE], _ALIGNMENT // 8)
        narrow = _joined([getattr(self, name) for name in NARROW], _ALIGNMENT // 4)
        data = np.concatenate([_bytes(wide), _bytes(narrow.astype(np.int32))])
        packed = torch.empty(data.size, dtype=torch.uint8, pin_memory=pinned)
        packed.numpy()[:] = data
        return packed

    def unpack(self, packed: Tensor) -> dict[str, Tensor]:
        """Views of a packed step of the same sizes, wherever it is."""
        sizes = {name: getattr(self, name).size for name in (*WIDE, *NARROW)}
        wide = [_room(sizes[name], _ALIGNMENT // 8) for name in WIDE]
        narrow = [_room(sizes[name], _ALIGNMENT // 4) for name in NARROW]
        start = 8 * sum(wide)
        parts = (
            *torch.split(packed[:start].view(torch.int64), wide),
            *torch.split(packed[start:].view(torch.int32), narrow),
        )
        return {name: part[: sizes[name]] for name, part in zip(sizes, parts, strict=True)}


def _room(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _joined(arrays: Sequence[IntArray], multiple: int) -> IntArray:
    """The arrays one after the other, each with zeros up to a multiple."""
    joined = np.zeros(sum(_room(array.size, multiple) for array in arrays), np.int64)
    start = 0
    for array in arrays:
        joined[start : start + array.size] = array
        start += _room(array.size, multiple)
    return joined


def _extend(array: IntArray, count: int, value: int) -> IntArray:
    return np.concatenate([array, np.full(count, value, np.int64)])


def _spread(array: IntArray, at: int, gap: int, behind: int, value: int) -> IntArray:
    """With as many values added before place ``at`` and behind all."""
    return np.concatenate([_extend(array[:at], gap, value), _extend(array[at:], behind, value)])


def _bytes(array: npt.NDArray[np.generic]) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(array).view(np.uint8)
