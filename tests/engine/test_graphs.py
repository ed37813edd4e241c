"""Which steps are captured, and what a captured step is padded with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.engine.test_step import MIXED, plan
from tp_engine.adapters import AdapterTraits
from tp_engine.steps.graphs import MIXED_CONTEXT, GraphKey, StepGraphs, bound, bounds
from tp_engine.steps.host_step import HostStep
from tp_engine.steps.plan import NO_ADAPTER
from tp_engine.steps.step_shape import (
    MIXED_ROWS,
    StepShape,
    batch_sizes,
    decode_shapes,
    mixed_shapes,
)

AFFINE = int(AdapterTraits.AFFINE)


def graphs(max_num_seqs: int = 64, max_model_len: int = 10_000, max_rows: int = 8192) -> StepGraphs:
    return StepGraphs(
        lambda host, packed: pytest.fail("nothing is computed"),
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        max_rows=max_rows,
        device=torch.device("cpu"),
    )


def shapes(max_num_seqs: int, max_rows: int) -> Iterator[StepShape]:
    yield from decode_shapes(max_num_seqs)
    yield from mixed_shapes(max_num_seqs, max_rows)


@pytest.mark.parametrize("most", [1, 3, 32, 33, 64, 100, 128, 129, 256, 1000])
def test_sizes_ascend_to_the_largest_batch_and_waste_little(most: int) -> None:
    sizes = batch_sizes(most)
    assert sizes == sorted(set(sizes)) and sizes[-1] == most
    for rows in range(1, most + 1):
        size = next(size for size in sizes if size >= rows)
        assert size <= max(2 * rows, rows + 32)


@pytest.mark.parametrize("most", [1, 64, 100, 512, 8192])
def test_steps_with_prompts_have_sizes_to_what_can_come(most: int) -> None:
    sizes = [shape.rows for shape in mixed_shapes(64, most)]
    assert sizes == sorted(set(sizes)) and sizes[-1] == min(most, MIXED_ROWS[-1])
    for rows in range(MIXED_ROWS[0] // 2, sizes[-1] + 1):
        assert next(size for size in sizes if size >= rows) <= 2 * rows


@pytest.mark.parametrize("last", [512, 1024, 4096, 5000])
def test_every_context_has_one_of_the_bounds(last: int) -> None:
    known = list(bounds(1024, 4, last))
    assert known[-1] == last
    for context in (1, 512, last - 1, last):
        assert bound(context, 1024, 4, last) == next(b for b in known if b >= context)


def test_ranks_are_bounded_by_powers_of_two() -> None:
    assert [bound(rank, 16, 2) for rank in (1, 16, 17, 64, 65)] == [16, 16, 32, 64, 128]


@pytest.mark.parametrize("shape", [*shapes(8, 100), *shapes(64, 2000)], ids=str)
def test_a_step_is_captured_with_padding_only(shape: StepShape) -> None:
    step = graphs().padded(HostStep.empty(), GraphKey(shape, 1024, 32))
    assert not step.contexts.any()
    for field in (step.slots, step.row_slots, step.logit_slots):
        assert set(field.tolist()) == {64}
    assert step.descriptors.tolist() == [NO_ADAPTER] * shape.sequences
    tiles = step.tiles.reshape(-1, 4)
    assert tiles.shape[0] == shape.tiles and (tiles[:, 0] == NO_ADAPTER).all()
    assert tiles[:, 2].max() == shape.rows
    assert step.segment_offsets[-1] == step.tokens.size == shape.rows
    assert (step.max_context, step.max_rank, step.max_rows) == (1024, 32, shape.rows)
    assert step.all_sample == (shape.prompts == 0)
    if step.all_sample:
        assert step.query_offsets.tolist() == list(range(shape.rows + 1))
        assert step.logit_rows.tolist() == list(range(shape.rows))
    else:
        assert not step.query_offsets.any()


def test_what_is_replayed_has_the_sizes_of_what_was_captured() -> None:
    """So that a step's fields lie where the graph reads them."""
    known, host = graphs(max_num_seqs=8), HostStep.of(MIXED)
    key = known.key_of(host)
    assert key is not None and key.shape.prompts > 0
    step, empty = (known.padded(each, key) for each in (host, HostStep.empty()))
    assert step.pack(pinned=False).numel() == empty.pack(pinned=False).numel()
    for name in ("decodes", "max_query", "max_context", "max_rank", "max_rows", "all_sample"):
        assert getattr(step, name) == getattr(empty, name), name


def test_a_decode_step_takes_a_shape_of_its_own_and_no_step_one_that_is_too_small() -> None:
    known = graphs(max_num_seqs=64, max_rows=2000)
    decode = HostStep.of(plan([[i, 1, 9, 1] for i in range(20)], [[20, -1]], max_rank=0))
    key = known.key_of(decode)
    assert key is not None and key == GraphKey(StepShape(24, 24), 1024, 0)
    silent = HostStep.of(plan([[0, 1, 9, 1], [1, 1, 9, 0]], [[2, -1]], max_rank=0))
    key = known.key_of(silent)
    assert key is not None and key.shape.prompts > 0
    many = HostStep.of(plan([[i, 2, 9, 1] for i in range(30)], [[60, -1]], max_rank=20))
    key = known.key_of(many)  # its rows would fit 64
    assert key is not None and key.shape.rows == 512 and key.max_rank == 32
    assert key.shape.prompts >= 30 and key.shape in mixed_shapes(64, 2000)
    assert known.key_of(HostStep.of(plan([[0, 1025, 1025, 1]], [[1025, -1]]))) is None
    assert known.key_of(replace(many, max_context=MIXED_CONTEXT + 1)) is None
    key = known.key_of(replace(decode, max_context=MIXED_CONTEXT + 1))
    assert key is not None and key.max_context == 10_000


def test_longer_steps_are_launched_with_one_segment_and_with_two() -> None:
    known = graphs(max_rows=2000)
    keys = list(known._longer(max_rank=20))
    assert {key.shape.rows for key in keys} == {1100, 1500, 2000}
    assert {key.max_rank for key in keys} == {16, 32}
    steps = [known.padded(HostStep.empty(), key) for key in keys]
    assert {step.descriptors.size for step in steps} == {1, 2}
    assert all(step.segment_offsets[-1] == step.tokens.size for step in steps)
    assert all(step.logit_rows.tolist() == [0] for step in steps)
    assert {(key.max_rank, key.traits) for key in keys} == {(16, 0), (16, AFFINE), (32, 0)}
    assert not list(known._longer(max_rank=0))


@pytest.mark.parametrize("max_num_seqs", [1, 5, 64, 200])
def test_every_step_of_few_rows_is_captured_beforehand(max_num_seqs: int) -> None:
    known, random = graphs(max_num_seqs, max_rows=1200), np.random.default_rng(max_num_seqs)
    captured = set(known.keys(max_rank=33, traits=0))
    assert {(key.max_rank, key.traits) for key in captured} == {(r, 0) for r in (0, 16, 32, 64)}
    more = set(known.keys(max_rank=33, traits=AFFINE)) - captured
    assert {(key.max_rank, key.traits) for key in more} == {(r, AFFINE) for r in (16, 32, 64)}
    assert {replace(key, traits=0) for key in more} == {key for key in captured if key.max_rank}
    for _ in range(200):
        count = int(random.integers(1, max_num_seqs + 1))
        rows = random.choice([1, 1, 1, 2, 20], count)
        rows.sort()
        sequences = [[i, int(n), int(random.integers(n, 4000)), 1] for i, n in enumerate(rows)]
        rank = int(random.integers(0, 34))
        host = HostStep.of(plan(sequences, [[int(rows.sum()), 3 if rank else -1]], max_rank=rank))
        key = known.key_of(host)
        prompts = int((rows > 1).sum())
        if rows.sum() <= MIXED_ROWS[-1] and prompts <= MIXED_ROWS[-1] // 16:
            assert key in captured
            padded = known.padded(host, key)
            assert padded.tokens.size == key.shape.rows
            assert padded.slots.size == padded.descriptors.size == key.shape.sequences
        else:
            assert key is None
