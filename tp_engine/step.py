"""From a plan to the tensors of a step: flat host arrays, one copy, views on the device.

Legend: T rows, B sequences, R sampled rows, G adapter segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels import AttentionBatch, LoraSegments
from kernels.entry import SpellOut
from kernels.lora.tiles import tile_table
from tp_engine.adapters import AdapterTraits
from tp_engine.layers import LoraBatch, StepInput
from tp_engine.plan import NO_ADAPTER, IntArray, StepPlan

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

    @property
    def every_row_samples(self) -> bool:
        """Whether all rows have logits: of decode steps, as a rule."""
        return self.logit_rows.size == self.tokens.size

    @classmethod
    def of(cls, plan: StepPlan) -> HostStep:
        """Spell out what a plan says."""
        slots, rows, contexts, samples = plan.sequences.reshape(-1, 4).T
        ends = np.cumsum(rows)
        lengths, descriptors = plan.segments.reshape(-1, 2).T
        several = np.flatnonzero(rows > 1)
        return cls(
            tokens=plan.tokens,
            # Row t of a sequence that ends before row e with context c has position c - (e - t).
            positions=np.arange(ends[-1]) + np.repeat(contexts - ends, rows),
            row_slots=np.repeat(slots, rows),
            logit_rows=ends[samples == 1] - 1,
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
        )

    def padded(self, size: int, spare_slot: int) -> HostStep:
        """A decode step of ``size`` sequences that says the same.

        What is added are sequences of one row without a context, in a slot that has no pages, and
        empty segments: nothing is stored or read for them.
        """
        more = size - self.slots.size
        offsets = np.full(size + 1, self.tokens.size, np.int64)
        offsets[: self.segment_offsets.size] = self.segment_offsets
        offsets[-1] = size  # the last segment holds the padding rows
        return replace(
            self,
            tokens=_extend(self.tokens, more, 0),
            positions=_extend(self.positions, more, 0),
            row_slots=_extend(self.row_slots, more, spare_slot),
            logit_rows=np.arange(size),
            logit_slots=_extend(self.slots, more, spare_slot),
            descriptors=_extend(self.descriptors, size - self.descriptors.size, NO_ADAPTER),
            slots=_extend(self.slots, more, spare_slot),
            query_offsets=np.arange(size + 1),
            contexts=_extend(self.contexts, more, 0),
            segment_offsets=offsets,
            tiles=_extend_tiles(self.tiles, size),
            decodes=size,
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


def _extend_tiles(tiles: npt.NDArray[np.int32], capacity: int) -> npt.NDArray[np.int32]:
    """Room for as many tiles as rows, all of which say how many there are."""
    table = np.full((capacity, 4), NO_ADAPTER, np.int32)
    table[: tiles.size // 4] = tiles.reshape(-1, 4)
    table[:, 3] = tiles[3]
    return table.ravel()


def _bytes(array: npt.NDArray[np.generic]) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(array).view(np.uint8)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMemory:
    """What a step refers to and what outlives it, on the device."""

    tables: Tensor
    """int32 [slots + 1, blocks]: page of each block by slot. The spare last slot has none: -1."""
    last_token: Tensor
    """int64 [slots + 1]."""
    kv: tuple[tuple[Tensor, Tensor], ...]
    """Key and value cache by layer."""
    arena: Tensor
    """uint8, flat."""
    adapter_records: Tensor
    """int64, flat."""
    block_tokens: int
    spell_out: SpellOut

    def logit_slots(self, host: HostStep, packed: Tensor) -> Tensor:
        """int64 [R], the slots of the rows with logits, from a packed step on the device."""
        return host.unpack(packed)["logit_slots"]

    def step_input(self, host: HostStep, packed: Tensor) -> StepInput:
        """The input of the decoder, from a packed step on the device."""
        fields = host.unpack(packed)
        rows = self.spell_out(
            fields["tokens"],
            fields["positions"],
            fields["row_slots"],
            fields["slots"],
            self.last_token,
            self.tables,
            block_tokens=self.block_tokens,
            blocks=-(-host.max_context // self.block_tokens),
        )
        return StepInput(
            tokens=rows.tokens,
            positions=fields["positions"],
            attention=AttentionBatch(
                query_offsets=fields["query_offsets"],
                context_lens=fields["contexts"],
                page_table=rows.page_table,
                write_pages=rows.write_pages,
                write_slots=rows.write_slots,
                max_query=host.max_query,
                max_context=host.max_context,
                decodes=host.decodes,
            ),
            # Where every row is wanted they are so in order.
            logit_rows=None if host.every_row_samples else fields["logit_rows"],
            kv=self.kv,
            lora=self._lora(host, fields),
        )

    def _lora(self, host: HostStep, fields: dict[str, Tensor]) -> LoraBatch | None:
        if host.max_rank == 0:
            return None
        segments = LoraSegments(
            offsets=fields["segment_offsets"],
            descriptors=fields["descriptors"],
            max_rank=host.max_rank,
            affine=bool(host.traits & AdapterTraits.AFFINE),
            max_rows=host.max_rows,
            tiles=fields["tiles"].view(-1, 4),
        )
        return LoraBatch(arena=self.arena, descriptors=self.adapter_records, segments=segments)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepLogits:
    """What a forward pass leaves to the sampler, on the device."""

    logits: Tensor
    """[R, V of this rank]."""
    best: Tensor
    """int64 [R, 2], of each row as `kernels.sampling.Greedy` gives it."""
    slots: Tensor
    """int64 [R]."""

    def first(self, rows: int) -> StepLogits:
        """Without the padding behind the first rows."""
        return StepLogits(logits=self.logits[:rows], best=self.best[:rows], slots=self.slots[:rows])
