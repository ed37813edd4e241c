"""Nobody gets another's weights, keys or pages, with room for few adapters."""

from collections.abc import Callable

import pytest

from tests.distributed.material import Material
from tests.distributed.oracle import Oracle
from tests.distributed.test_greedy import check
from tests.distributed.torchrun import Run
from tests.distributed.workload import Case

FEW = [1, 2, 3]


@pytest.mark.parametrize("world", FEW)
@pytest.mark.parametrize("name", ["place-taken-over", "rotation"])
def test_adapters_that_share_too_little_room_stay_themselves(
    material: Material,
    run: Callable[[int], Run],
    oracle: Callable[[Case], Oracle],
    world: int,
    name: str,
) -> None:
    result = run(world).result(name)
    assert result.counters["adapter_evictions"] >= 2
    assert result.counters["adapter_loads"] > len(material.cases[name].adapters)
    check(material, run(world), oracle, name)


@pytest.mark.parametrize("world", FEW)
def test_one_prompt_has_three_answers_cached_or_not(
    material: Material, run: Callable[[int], Run], oracle: Callable[[Case], Oracle], world: int
) -> None:
    cold, warm = run(world).result("prompt-of-three").rounds
    assert len({tuple(answer.tokens) for answer in cold}) == 3
    assert [answer.tokens for answer in warm] == [answer.tokens for answer in cold]
    assert [answer.cached_tokens for answer in cold] == [0, 0, 0]
    assert all(answer.cached_tokens >= 16 for answer in warm)
    check(material, run(world), oracle, "prompt-of-three")


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", ["aborted", "aborted-overlap"])
def test_aborts_give_everything_back_and_later_requests_are_right(
    material: Material,
    run: Callable[[int], Run],
    oracle: Callable[[Case], Oracle],
    world: int,
    name: str,
) -> None:
    result = run(world).result(name)
    assert result.gauges_running["num_requests_running"] > 4
    assert result.gauges_running["num_requests_waiting"] > 0
    assert result.gauges_running["pages_kv"] > 0
    for gauge in ("num_requests_running", "num_requests_waiting", "pages_kv", "integrity_faults"):
        assert result.gauges_aborted[gauge] == 0
    assert result.counters["aborted"] == 16
    check(material, run(world), oracle, name)


@pytest.mark.parametrize("world", FEW)
@pytest.mark.parametrize("name", ["alone", "alone-cached"])
def test_a_request_alone_and_in_a_batch_are_equal_bit_for_bit(
    material: Material, run: Callable[[int], Run], world: int, name: str
) -> None:
    """LoRA ranks 1, 8, 16, 33 and 64 and the base; chunked prompts without the prefix cache, and
    with it."""
    result = run(world).result(name)
    together, *alone = result.rounds
    by_ask = dict(zip(map(repr, material.cases[name].rounds[0]), together, strict=True))
    assert len(alone) == len(together) + 1
    for asks, (answer,) in zip(material.cases[name].rounds[1:], alone, strict=True):
        wanted = by_ask[repr(asks[0])]
        assert answer.tokens == wanted.tokens
        assert answer.logprobs == wanted.logprobs
        assert answer.logprobs
    if name == "alone":
        assert result.counters["chunked_prefills"] > 0
    else:
        assert result.counters["prefix_hit_tokens"] > 0
