"""Adapters of the embedding and the LM head equal PEFT in mixed batches, at every world size."""

from collections.abc import Callable

import pytest

from tests.distributed.material import END_KINDS, ENDS, Material
from tests.distributed.oracle import Oracle
from tests.distributed.test_greedy import check
from tests.distributed.torchrun import Run
from tests.distributed.workload import Case

ROTATING = [f"{name}-rotation" for name in ENDS if name.endswith("plain")]


@pytest.mark.parametrize("name", [*ENDS, *ROTATING])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_mixed_batch_equals_peft(
    material: Material,
    run: Callable[[int], Run],
    oracle: Callable[[Case], Oracle],
    world: int,
    name: str,
) -> None:
    (asks, *_) = material.cases[name].rounds
    assert {ask.model for ask in asks} == {None, *END_KINDS}
    check(material, run(world), oracle, name)


@pytest.mark.parametrize("name", ROTATING)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_they_leave_and_come_back(run: Callable[[int], Run], world: int, name: str) -> None:
    """Else the rotation would not show that no stale row is read."""
    result = run(world).result(name)
    assert result.counters["adapter_evictions"] > 0 and result.faults == []
    assert result.num_pages < result.pages_at_once


@pytest.mark.parametrize("name", ENDS)
def test_every_kind_changes_the_output(run: Callable[[int], Run], name: str) -> None:
    """Else the comparison would not show that it was applied."""
    (answers,) = run(1).result(name).rounds
    assert len({tuple(answer.tokens) for answer in answers}) == len(answers)
