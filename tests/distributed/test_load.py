"""Sixty-four requests over the base and eight adapters in a quarter of the pages they want."""

from collections.abc import Callable

import pytest

from tests.distributed.material import LOAD_REQUESTS, LOAD_TOKENS, Material
from tests.distributed.oracle import Oracle
from tests.distributed.test_greedy import check
from tests.distributed.torchrun import Run
from tests.distributed.workload import Case, Result

LOADS = [
    "load-tiny",
    "load-tiny-deterministic",
    "load-tiny-overlap",
    "load-tiny-cold",
    "smol-load",
]


@pytest.mark.parametrize("name", LOADS)
def test_the_load_meets_every_hard_situation(
    material: Material, run: Callable[[int], Run], name: str
) -> None:
    """Else the equality below would prove little."""
    case, result = material.cases[name], run(2).result(name)
    assert len(case.rounds[0]) == LOAD_REQUESTS
    assert len(case.adapters) == 8
    assert result.num_pages == result.pages_at_once // 4
    counters = result.counters
    cold = name == "load-tiny-cold"  # what waits for reads leaves more room than it finds
    for counter in (
        *(() if cold else ("preemptions", "adapter_evictions", "pages_taken_over_by_kv")),
        "prefix_hit_tokens",
        "chunked_prefills",
        "pages_taken_over_by_adapter",
    ):
        assert counters[counter] > 0, counter
    assert (counters["adapter_fetches"] > 0) == cold
    assert counters["finished"] == sum(map(len, case.rounds))
    assert counters["generation_tokens"] == LOAD_TOKENS * sum(map(len, case.rounds))
    assert counters["forward_calls"] == counters["steps"]


@pytest.mark.parametrize("name", ["load-tiny", "load-tiny-overlap", "smol-load"])
def test_most_steps_compute_four_revisions_at_once(run: Callable[[int], Run], name: str) -> None:
    counters = run(2).result(name).counters
    assert counters["steps_with_4_revisions"] > counters["steps"] / 2


def test_under_load_every_output_is_that_of_its_solo_run(
    material: Material, run: Callable[[int], Run]
) -> None:
    result: Result = run(2).result("load-tiny-deterministic")
    together, *alone = result.rounds
    assert len(alone) == LOAD_REQUESTS
    wrong = [
        i
        for i, (solo,) in enumerate(alone)
        if solo.tokens != together[i].tokens or len(solo.tokens) != LOAD_TOKENS
    ]
    assert wrong == []


@pytest.mark.parametrize("name", LOADS)
def test_under_load_every_output_is_the_oracles(
    material: Material, run: Callable[[int], Run], oracle: Callable[[Case], Oracle], name: str
) -> None:
    check(material, run(2), oracle, name)
