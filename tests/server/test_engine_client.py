"""The client of the engine: order, bounds, aborts, and what happens when the engine goes."""

from __future__ import annotations

import asyncio

import pytest

from server import EngineClient, engine_client
from server import batch as batch_module
from server.batch import Batch, merge, size
from server.errors import ApiError, EngineDead, InvalidRequest, NoAnswer, Unavailable
from tests.server.fake_engine import FakeEngine
from tp_engine.messages import Failed, ListAdapters, Output, Submit, TokenLogprobs
from tp_engine.params import SamplingParams

pytestmark = pytest.mark.anyio


def submit(name: str, *, max_tokens: int = 8, model: str = "base") -> Submit:
    params = SamplingParams(max_tokens=max_tokens)
    return Submit(request_id=name, model=model, prompt=[1, 2], params=params)


def output(name: str, tokens: list[int], finish: str | None = None) -> Output:
    return Output(
        request_id=name, tokens=tokens, finish_reason=finish, completion_tokens=len(tokens)
    )


async def test_outputs_arrive_in_order_and_end(client: EngineClient) -> None:
    got: dict[int, list[int]] = {0: [], 1: []}
    with client.submit([submit("a"), submit("b", max_tokens=5)]) as batch:
        async for index, item in batch:
            got[index] += item.tokens
    assert got == {0: [1, 2] * 4, 1: [1, 2, 1, 2, 1]}
    assert client.open_requests == 0


async def test_a_finished_request_is_not_aborted(client: EngineClient, engine: FakeEngine) -> None:
    with client.submit([submit("a")]) as batch:
        assert [item async for item in batch]
    with client.submit([submit("b")]) as batch:
        assert [item async for item in batch]
    assert engine.aborts == []


async def test_leaving_early_aborts(client: EngineClient, engine: FakeEngine) -> None:
    engine.delay = 0.01
    with client.submit([submit("a", max_tokens=500), submit("b", max_tokens=500)]) as batch:
        async for _ in batch:
            break
    assert client.open_requests == 0
    await engine.settled(aborts=2)
    assert {(abort.request_id, abort.finished) for abort in engine.aborts} == {
        ("a", False),
        ("b", False),
    }


async def test_a_slow_reader_gets_everything_and_holds_nobody(
    client: EngineClient, engine: FakeEngine
) -> None:
    with client.submit([submit("slow", max_tokens=1000)]) as slow:
        with client.submit([submit("quick", max_tokens=1000)]) as quick:
            assert sum([len(item.tokens) async for _, item in quick]) == 1000
        await engine.settled(aborts=0)
        items = [item async for _, item in slow]
    assert len(items) == 1
    assert items[0].tokens == [1, 2] * 500
    assert items[0].finish_reason == "length"


def test_merging_keeps_tokens_logprobs_and_the_latest_counts() -> None:
    def logprob(token: int) -> TokenLogprobs:
        return TokenLogprobs(token=token, logprob=-1.0, top_ids=[], top_logprobs=[])

    first = Output(request_id="a", tokens=[1], logprobs=[logprob(1)], completion_tokens=1)
    last = Output(
        request_id="a", tokens=[2], logprobs=[logprob(2)], completion_tokens=3,
        finish_reason="stop", stop_token=9, cached_tokens=2,
    )  # fmt: skip
    merged = merge(first, last)
    assert merged.tokens == [1, 2] and merged.logprobs == [logprob(1), logprob(2)]
    assert (merged.finish_reason, merged.stop_token, merged.completion_tokens) == ("stop", 9, 3)
    end = Output(request_id="a", tokens=[], finish_reason="length")
    assert merge(first, end).logprobs == [logprob(1)]
    assert merge(output("a", [1]), end).logprobs is None


async def test_busy_indices_do_not_starve_others() -> None:
    batch = Batch(["a", "b"], lambda request_id, finished: None)
    batch.deliver(output("a", [1]))
    batch.deliver(output("b", [5]))
    assert (await anext(batch))[0] == 0
    batch.deliver(output("a", [2]))
    assert (await anext(batch))[0] == 1


async def test_what_is_unread_is_bounded_and_what_is_read_does_not_count(
    client: EngineClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_module, "MAX_UNREAD", 100)
    with client.submit([submit("read", max_tokens=400)]) as batch:
        assert sum([len(item.tokens) async for _, item in batch]) == 400
    with client.submit([submit("a", max_tokens=60), submit("b", max_tokens=10**4)]) as batch:
        async with asyncio.timeout(5):
            while client.open_requests:
                await asyncio.sleep(0.005)
        with pytest.raises(ApiError, match="wait to be read: at most 100"):
            await anext(batch)
    await engine.settled(aborts=1)
    assert {abort.request_id for abort in engine.aborts} <= {"a", "b"}


def test_log_probabilities_count_as_what_they_hold() -> None:
    entry = TokenLogprobs(token=1, logprob=-1.0, top_ids=[1, 2], top_logprobs=[-1.0, -2.0])
    reported = Output(request_id="a", tokens=[1, 2], logprobs=[entry, entry])
    batch = Batch(["a", "b"], lambda request_id, finished: None)
    for _ in range(3):
        batch.deliver(reported)
    assert (size(reported), batch._waiting) == (8, 24)
    batch.finish(0)
    assert batch._waiting == 0


async def test_a_failure_fails_the_group() -> None:
    closed: list[tuple[str, bool | None]] = []
    batch = Batch(["a", "b"], lambda request_id, finished: closed.append((request_id, finished)))
    batch.deliver(Failed(request_id="b", code="invalid_request", message="no", param="n"))
    with pytest.raises(InvalidRequest, match="no") as caught:
        await anext(batch)
    assert caught.value.param == "n"
    batch.close()
    batch.close()
    assert closed == [("b", None), ("a", False)]


async def test_the_number_of_open_requests_is_bounded(engine: FakeEngine) -> None:
    engine.gate.clear()
    client = EngineClient(engine.to_engine, engine.to_front_end, max_open=2)
    async with client:
        with pytest.raises(Unavailable, match="starting"):
            client.submit([submit("a")])
        await engine.announce()
        await client.wait_for(lambda: client.ready is not None)
        with client.submit([submit("a")]):
            with pytest.raises(Unavailable, match="limit is 2"):
                client.submit([submit("b"), submit("c")])
            assert client.open_requests == 1
        with pytest.raises(InvalidRequest, match="3 outputs: at most 2"):
            client.submit([submit("b"), submit("c"), submit("d")])
        with client.submit([submit("b"), submit("c")]):
            assert client.open_requests == 2


async def test_the_prompt_tokens_of_open_requests_are_bounded(
    client: EngineClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_client, "MAX_GROUP_TOKENS", 6)
    monkeypatch.setattr(engine_client, "MAX_OPEN_TOKENS", 8)
    engine.gate.clear()
    with pytest.raises(InvalidRequest, match="4 outputs have 8 tokens: at most 6") as caught:
        client.submit([submit(name) for name in "abcd"])
    assert caught.value.param == "n"
    with client.submit([submit(name) for name in "abc"]):
        with client.submit([submit("d")]), pytest.raises(Unavailable, match="limit is 8"):
            client.submit([submit("e")])
        engine.gate.set()
        async with asyncio.timeout(5):
            while client.open_requests:
                await asyncio.sleep(0.005)
    engine.gate.clear()
    with client.submit([submit(name) for name in "fgh"]), client.submit([submit("i")]):
        assert client.open_requests == 4


@pytest.mark.parametrize("by_message", [False, True])
async def test_a_lost_engine_fails_what_is_open_and_what_comes(
    client: EngineClient, engine: FakeEngine, by_message: bool
) -> None:
    engine.gate.clear()
    with client.submit([submit("a"), submit("b")]) as batch:
        if by_message:
            await engine.send(Failed(request_id="", code="engine_dead", message="rank 2 hangs"))
        else:
            client.engine_died("rank 2 hangs")
        async with asyncio.timeout(2):
            with pytest.raises(EngineDead, match="rank 2 hangs"):
                await anext(batch)
    with pytest.raises(EngineDead, match="rank 2 hangs"):
        client.submit([submit("c")])


async def test_an_unreadable_message_counts_as_a_lost_engine(
    client: EngineClient, engine: FakeEngine
) -> None:
    engine.gate.clear()
    with client.submit([submit("a")]) as batch:
        await engine._push.send(b"\xc1 no message")
        with pytest.raises(EngineDead, match="unreadable"):
            await anext(batch)


async def test_outputs_of_unknown_requests_are_dropped(
    client: EngineClient, engine: FakeEngine
) -> None:
    await engine.send(output("gone", [1]))
    with client.submit([submit("a", max_tokens=2)]) as batch:
        assert [item.tokens async for _, item in batch][-1][-1] == 2


async def test_leaving_does_not_wait_for_a_silent_engine(socket_directory: object) -> None:
    client = EngineClient(
        f"ipc://{socket_directory}/nobody", f"ipc://{socket_directory}/nobody-either"
    )
    async with asyncio.timeout(5):
        async with client:
            client.goodbye()


async def test_a_call_that_takes_too_long_is_given_up_and_the_next_one_answered(
    engine: FakeEngine,
) -> None:
    ends = engine.to_engine, engine.to_front_end
    async with EngineClient(*ends, call_timeout=0.05) as client:
        await engine.announce()
        async with asyncio.timeout(5):
            await client.wait_for(lambda: client.ready is not None)
            engine.gate.clear()
            with pytest.raises(NoAnswer, match=r"within 0\.05 s"):
                await client.call(ListAdapters(call_id="slow"))
            engine.gate.set()
            answer = await client.call(ListAdapters(call_id="next"))
    assert answer.call_id == "next", "the late answer of another call is nobody's"
