"""What happens before the first request, on a fake model."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.fake import FakeWorker, add_adapter, image, make_engine, solo, submit
from tp_engine.adapters import ImageSize
from tp_engine.params import SamplingParams
from tp_engine.scheduler import SchedulerCounters
from tp_engine.steps.plan import NO_ADAPTER, PlanKind, StepPlan
from tp_engine.steps.warm_up import GPU_ROWS, split, warm_up


def steps(worker: FakeWorker) -> Sequence[StepPlan]:
    return [plan for plan in worker.plans if plan.kind is PlanKind.STEP]


def rows(plan: StepPlan) -> int:
    return int(plan.sequences.reshape(-1, 4)[:, 1].sum())


def with_adapters(plan: StepPlan) -> set[bool]:
    """Whether segments have one."""
    return set((plan.segments.reshape(-1, 2)[:, 1] != NO_ADAPTER).tolist())


@pytest.mark.parametrize("max_model_len", [64, 4096])
def test_a_gpu_sees_every_range_of_rows_with_and_without_adapters(max_model_len: int) -> None:
    """In prompts that a short context makes several of."""
    engine, worker = make_engine(
        pages=1200, slots=96, budget=3000, max_model_len=max_model_len, descriptor_words=5000
    )
    add_adapter(engine, "a")
    warm_up(engine, gpu=True)
    for kinds in ({False}, {True}, {False, True}):
        seen = {rows(plan) for plan in steps(worker) if with_adapters(plan) == kinds}
        assert {*GPU_ROWS, 3000} - seen <= ({1} if len(kinds) == 2 else set())
    captures = [plan for plan in worker.plans if plan.kind is PlanKind.CAPTURE]
    assert [plan.max_rank for plan in captures] == [4]


def test_a_cpu_computes_one_row_at_a_time() -> None:
    engine, worker = make_engine()
    add_adapter(engine, "a")
    warm_up(engine, gpu=False)
    assert {rows(plan) for plan in steps(worker)} == {1}
    assert [with_adapters(plan) for plan in steps(worker)[::2]] == [{False}, {True}]


@pytest.mark.parametrize("gpu", [False, True])
def test_nothing_is_left_behind(gpu: bool) -> None:
    engine, _ = make_engine(pages=64)
    before = dict(engine.counters)
    warm_up(engine, gpu=gpu)
    assert engine.counters == before and not engine.requests
    assert engine.scheduler.counters == SchedulerCounters()
    assert engine.pool.free == 64 and engine.check_integrity() == []
    params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
    submit(engine, "r", [1, 2, 3], params)
    tokens: list[int] = []
    while engine.requests:
        tokens += [token for output in engine.step() for token in output.tokens]  # type: ignore[union-attr]  # none fails
    assert tokens == solo("", [1, 2, 3], params)


@pytest.mark.parametrize("readable", [True, False])
def test_a_cold_adapter_is_read_before_its_requests_could_be_too_many(readable: bool) -> None:
    def fetch(digest: str) -> list[Any]:
        if not readable:
            raise OSError(5, "Input/output error")
        return [image(digest)]

    engine, worker = make_engine(adapter_queue=0, fetch=fetch)
    engine.roster.begin("x", "x", ImageSize(2, 8, 4, 0, 200), None)
    warm_up(engine, gpu=True)
    assert {True} in [with_adapters(plan) for plan in steps(worker)] or not readable
    assert engine.check_integrity() == [] and not engine.requests


def test_the_shortest_context_has_room_for_a_row() -> None:
    engine, worker = make_engine(max_model_len=2)
    warm_up(engine, gpu=False)
    assert [rows(plan) for plan in steps(worker)] == [1]


@given(st.integers(1, 10_000), st.integers(1, 300))
def test_split_keeps_the_sum_and_the_limit(count: int, longest: int) -> None:
    lengths = split(count, longest)
    assert sum(lengths) == count and max(lengths) <= longest
    assert min(lengths) >= 1 and max(lengths) - min(lengths) <= 1
