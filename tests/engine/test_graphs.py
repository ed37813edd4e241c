"""Which decode steps are captured, and what a captured step is padded with."""

from __future__ import annotations

import pytest

from tp_engine.graphs import GraphKey, _empty_step, batch_sizes, bound, bounds
from tp_engine.plan import NO_ADAPTER


@pytest.mark.parametrize("most", [1, 3, 32, 33, 64, 100, 128, 129, 256, 1000])
def test_sizes_ascend_to_the_largest_batch_and_waste_little(most: int) -> None:
    sizes = batch_sizes(most)
    assert sizes == sorted(set(sizes)) and sizes[-1] == most
    for rows in range(1, most + 1):
        size = next(size for size in sizes if size >= rows)
        assert size <= max(2 * rows, rows + 32)


@pytest.mark.parametrize("last", [512, 1024, 4096, 5000])
def test_every_context_has_one_of_the_bounds(last: int) -> None:
    known = list(bounds(1024, 4, last))
    assert known[-1] == last
    for context in (1, 512, last - 1, last):
        assert bound(context, 1024, 4, last) == next(b for b in known if b >= context)


def test_ranks_are_bounded_by_powers_of_two() -> None:
    assert [bound(rank, 16, 2) for rank in (1, 16, 17, 64, 65)] == [16, 16, 32, 64, 128]


def test_a_step_is_captured_with_padding_only() -> None:
    step = _empty_step(GraphKey(8, 1024, 32), spare_slot=99)
    assert step.slots.tolist() == [99] * 8
    assert not step.contexts.any()
    assert step.descriptors.tolist() == [NO_ADAPTER] * 8
    assert step.tiles.reshape(-1, 4).tolist() == [[NO_ADAPTER] * 3 + [0]] * 8
    assert step.segment_offsets[-1] == step.query_offsets[-1] == 8
    assert (step.max_context, step.max_rank, step.max_rows) == (1024, 32, 8)
