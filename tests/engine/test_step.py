"""A step's arrays survive the trip to the device, and padding says nothing new."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kernels.entry.reference import spell_out
from tp_engine.adapters import AdapterTraits
from tp_engine.steps.host_step import NARROW, WIDE, HostStep
from tp_engine.steps.plan import LAST_SAMPLED, NO_ADAPTER, PlanKind, StepPlan
from tp_engine.steps.step import StepMemory
from tp_engine.steps.step_shape import StepShape


def plan(sequences: list[list[int]], segments: list[list[int]], max_rank: int = 4) -> StepPlan:
    rows = sum(sequence[1] for sequence in sequences)
    return StepPlan(
        kind=PlanKind.STEP,
        step=0,
        sequences=np.array(sequences, np.int64).reshape(-1),
        tokens=np.arange(100, 100 + rows),
        segments=np.array(segments, np.int64).reshape(-1),
        max_rank=max_rank,
    )


MIXED = plan([[3, 1, 9, 1], [1, 1, 4, 1], [0, 3, 5, 0], [2, 2, 2, 1]], [[1, 40], [4, -1], [2, 7]])


def test_rows_positions_and_bounds_follow_from_the_sequences() -> None:
    host = HostStep.of(MIXED)
    assert host.positions.tolist() == [8, 3, 2, 3, 4, 0, 1]
    assert host.row_slots.tolist() == [3, 1, 0, 0, 0, 2, 2]
    assert host.logit_rows.tolist() == [0, 1, 6]
    assert host.logit_slots.tolist() == [3, 1, 2]
    assert not host.all_sample
    assert host.query_offsets.tolist() == [0, 1, 2, 5, 7]
    assert host.segment_offsets.tolist() == [0, 1, 5, 7]
    assert (host.decodes, host.max_query, host.max_context, host.max_rows) == (2, 3, 9, 2)


def test_packing_is_undone_by_unpacking_and_fields_are_aligned() -> None:
    host = HostStep.of(MIXED)
    packed = host.pack(pinned=False)
    fields = host.unpack(packed)
    for name, field in fields.items():
        assert (field.data_ptr() - packed.data_ptr()) % 16 == 0, name
    for name in (*WIDE, *NARROW):
        assert fields[name].tolist() == getattr(host, name).tolist()
        assert fields[name].dtype == (torch.int64 if name in WIDE else torch.int32)


@pytest.mark.parametrize("segments", [[[3, -1]], [[1, 5], [2, -1]], [[1, 5], [1, 6], [1, 7]]])
@pytest.mark.parametrize("size", [3, 4, 8])
def test_padding_keeps_the_step_and_adds_rows_without_context(segments, size: int) -> None:
    step = HostStep.of(plan([[0, 1, 3, 1], [4, 1, 6, 1], [2, 1, 1, 1]], segments))
    padded = step.padded(StepShape(size, size), spare_slot=9)
    for name in ("tokens", "positions", "row_slots", "slots", "contexts"):
        assert getattr(padded, name)[:3].tolist() == getattr(step, name).tolist()
        assert getattr(padded, name).size == size
    assert padded.slots[3:].tolist() == [9] * (size - 3)
    assert padded.logit_slots.tolist() == padded.slots.tolist()
    assert padded.all_sample
    assert not padded.contexts[3:].any()
    assert padded.query_offsets.tolist() == list(range(size + 1))
    assert padded.descriptors.size == size and padded.segment_offsets.size == size + 1
    tiles = padded.tiles.reshape(-1, 4)
    used = tiles[tiles[:, 2] != NO_ADAPTER]
    assert len(tiles) == size and (tiles[:, 3] == len(used)).all()
    assert (tiles[: len(used)] == used).all()
    tiled = np.full(size, NO_ADAPTER - 1)
    for descriptor, first, stop, _ in used:
        tiled[first:stop] = descriptor
    owners = np.repeat(padded.descriptors, np.diff(padded.segment_offsets)).tolist()
    wanted = [descriptor for rows, descriptor in segments for _ in range(rows)]
    assert owners == wanted + [NO_ADAPTER] * (size - 3)
    assert tiled.tolist() == owners


def sequences_of(step: HostStep) -> list[tuple[int, int, list[int]]]:
    """Slot, context and tokens of each sequence that has rows."""
    bounds = zip(step.query_offsets[:-1], step.query_offsets[1:], strict=True)
    parts = [step.tokens[start:stop].tolist() for start, stop in bounds]
    found = zip(step.slots.tolist(), step.contexts.tolist(), parts, strict=True)
    return [sequence for sequence in found if sequence[2]]


@pytest.mark.parametrize(
    "shape", [StepShape(7, 3, 2), StepShape(7, 4, 3), StepShape(24, 5, 2), StepShape(64, 20, 9)]
)
def test_a_step_with_prompts_is_padded_between_and_behind(shape: StepShape) -> None:
    step = HostStep.of(MIXED)
    padded = step.padded(shape, spare_slot=9)
    assert sequences_of(padded) == sequences_of(step)
    rows = padded.query_offsets[1:] - padded.query_offsets[:-1]
    assert (rows[: shape.decodes] <= 1).all() and padded.decodes == shape.decodes
    assert rows.size == shape.sequences and rows.sum() == 7 and padded.tokens.size == shape.rows
    added = rows == 0
    assert (padded.slots[added] == 9).all() and not padded.contexts[added].any()
    assert (padded.row_slots[7:] == 9).all() and (padded.positions[7:] == 0).all()
    assert padded.logit_rows[:3].tolist() == [0, 1, 6] and padded.logit_rows.max() < shape.rows
    assert padded.logit_slots.tolist() == [3, 1, 2] + [9] * (shape.decodes - 3)
    owners = np.repeat(padded.descriptors, np.diff(padded.segment_offsets)).tolist()
    assert owners == [40, -1, -1, -1, -1, 7, 7] + [NO_ADAPTER] * (shape.rows - 7)
    tiles = padded.tiles.reshape(-1, 4)
    assert tiles[tiles[:, 0] != NO_ADAPTER, :3].tolist() == [[40, 0, 1], [7, 5, 7]]
    assert len(tiles) == shape.tiles and (tiles[:, 2] - tiles[:, 1]).sum() == shape.rows


def test_the_decoder_sees_sampled_tokens_pages_and_adapters() -> None:
    step = plan([[1, 1, 18, 1], [0, 2, 2, 1]], [[1, 12], [2, -1]])
    step.tokens[0] = LAST_SAMPLED
    host = HostStep.of(step)
    memory = StepMemory(
        tables=torch.tensor([[5, 0], [7, 8], [-1, -1]], dtype=torch.int32),
        last_token=torch.tensor([11, 22, -1]),
        kv=(),
        arena=torch.zeros(0, dtype=torch.uint8),
        adapter_records=torch.zeros(0, dtype=torch.int64),
        block_tokens=16,
        spell_out=spell_out,
    )
    seen = memory.step_input(host, host.pack(pinned=False))
    assert seen.tokens.tolist() == [22, 101, 102]
    assert seen.attention.page_table.tolist() == [[7, 8], [5, 0]]
    assert seen.attention.write_pages.tolist() == [8, 5, 5]
    assert seen.attention.write_slots.tolist() == [1, 0, 1]
    assert seen.lora is not None
    assert seen.lora.segments.descriptors.tolist() == [12, -1]
    assert seen.lora.segments.tiles is not None
    assert seen.lora.segments.tiles.tolist() == [[12, 0, 1, 2], [-1, 1, 3, 2]]
    assert not seen.lora.segments.affine
    affine = replace(host, traits=int(AdapterTraits.AFFINE))
    seen = memory.step_input(affine, affine.pack(pinned=False))
    assert seen.lora is not None and seen.lora.segments.affine
    spare = HostStep.of(plan([[1, 1, 18, 1]], [[1, -1]], max_rank=0)).padded(StepShape(2, 2), 2)
    padded = memory.step_input(spare, spare.pack(pinned=False))
    assert padded.attention.write_pages.tolist() == [8, -1]
    assert padded.lora is None
