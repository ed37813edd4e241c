"""The routes of an adapter's life: what they ask of the engine, and what they answer."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from server import EngineClient, ServerConfig, create_app
from server.admin import lifecycle
from server.auth import ApiKeys
from tests.server.fake_engine import FakeEngine
from tp_engine.messages import (
    AdapterReply,
    AdaptersFlushed,
    DrainAdapter,
    FlushAdapters,
    PinAdapter,
    PreloadAdapter,
    ResumeAdapter,
)
from tp_engine.text import Tokenizer

pytestmark = pytest.mark.anyio


@pytest.fixture
async def operator(client: EngineClient, tokenizer: Tokenizer) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(client, tokenizer, ServerConfig(admin_keys=ApiKeys(["sk-admin"])))
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app),
        base_url="http://test",
        headers={"Authorization": "Bearer sk-admin"},
    ) as http:
        yield http


@pytest.mark.parametrize(
    ("path", "body", "kind", "fields"),
    [
        ("a/b/pin", None, PinAdapter, {"name": "a/b", "pinned": True}),
        ("x/unpin", None, PinAdapter, {"name": "x", "pinned": False}),
        ("x/drain", None, DrainAdapter, {"name": "x", "seconds": 60.0, "remove": False}),
        ("x/drain", {"seconds": 5, "remove": True}, DrainAdapter, {"seconds": 5, "remove": True}),
        ("x/resume", None, ResumeAdapter, {"name": "x"}),
    ],
)
async def test_each_route_makes_its_call(
    path: str,
    body: dict[str, Any] | None,
    kind: type,
    fields: dict[str, Any],
    operator: httpx.AsyncClient,
    engine: FakeEngine,
) -> None:
    engine.answer = lambda call: AdapterReply(call_id=call.call_id, revision="r", requests=3)
    answer = await operator.post(f"/admin/adapters/{path}", json=body)
    assert answer.status_code == 200 and answer.json()["requests"] == 3
    (call,) = engine.calls
    assert isinstance(call, kind)
    assert {name: getattr(call, name) for name in fields} == fields


@pytest.mark.parametrize("seconds", [-1, 1e9])
async def test_a_drain_has_a_deadline(seconds: float, operator: httpx.AsyncClient) -> None:
    answer = await operator.post("/admin/adapters/x/drain", json={"seconds": seconds})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "seconds")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/x/drain", {"removed": True}),
        ("/x/preload", {"level": "host"}),
        ("/x/promote", {"revision": "f" * 64, "force": True}),
        ("", {"name": "x", "source": "/x", "load_inplace": True}),
    ],
)
async def test_a_field_that_is_not_known_is_refused_by_name(
    path: str, body: dict[str, Any], operator: httpx.AsyncClient, engine: FakeEngine
) -> None:
    answer = await operator.post(f"/admin/adapters{path}", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, [*body][-1])
    assert not engine.calls


async def test_a_flush_tells_what_was_written_and_fails_when_something_was_not(
    operator: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.answer = lambda call: AdaptersFlushed(call_id=call.call_id, written=["x"], failed={})
    assert (await operator.post("/admin/flush")).json() == {"written": ["x"]}
    engine.answer = lambda call: AdaptersFlushed(
        call_id=call.call_id, written=[], failed={"x": "no room"}
    )
    answer = await operator.post("/admin/adapters/x/flush")
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "store_failed")
    assert "'x': no room" in answer.json()["error"]["message"]
    assert [call.name for call in engine.calls if isinstance(call, FlushAdapters)] == [None, "x"]


async def test_an_unknown_name_is_404(operator: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.answer = lambda call: AdapterReply(
        call_id=call.call_id, code="adapter_not_found", message="no x"
    )
    for path in ("adapters/x/pin", "adapters/x/drain", "adapters/x/flush"):
        assert (await operator.post(f"/admin/{path}")).status_code == 404


async def test_a_preload_answers_when_it_is_there(
    operator: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.answer = lambda call: AdapterReply(call_id=call.call_id, revision="r")
    answer = await operator.post("/admin/adapters/x/preload", json={"tier": "host"})
    assert (answer.status_code, answer.json()["revision"]) == (200, "r")
    engine.answer = lambda call: AdapterReply(call_id=call.call_id, code="no_room", message="full")
    refused = await operator.post("/admin/adapters/x/preload")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_room")
    calls = [call for call in engine.calls if isinstance(call, PreloadAdapter)]
    assert [call.arena for call in calls] == [False, True]
    wrong = await operator.post("/admin/adapters/x/preload", json={"tier": "moon"})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "tier")


async def test_a_long_preload_is_an_operation_and_no_second_one_is_begun(
    operator: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "PRELOAD_SECONDS", 0.05)
    engine.answer = lambda call: AdapterReply(call_id=call.call_id, revision="r")
    engine.gate.clear()
    begun = await operator.post("/admin/adapters/x/preload")
    assert begun.status_code == 202 and begun.json()["state"] == "preloading"
    assert (await operator.post("/admin/adapters/x/preload")).status_code == 409
    cancelled = await operator.post(f"{begun.headers['location']}/cancel")
    assert (cancelled.status_code, cancelled.json()["error"]["code"]) == (409, "not_cancellable")
    engine.gate.set()
    async with asyncio.timeout(5):
        while (await operator.get(begun.headers["location"])).json()["state"] != "ready":
            await asyncio.sleep(0.01)
    assert (await operator.get(begun.headers["location"])).json()["result"]["revision"] == "r"
