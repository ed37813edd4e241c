"""Long operations of the control plane: begun, watched, cancelled, and remembered for a while."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from server import EngineClient, ServerConfig, create_app
from server.admin import listing, operations
from server.admin.replies import Done
from server.auth import ApiKeys
from server.errors import Conflict
from tests.server.conftest import in_process
from tests.server.fake_engine import MODELS, FakeEngine
from tests.sources.web import CONFIG, WEIGHTS, Web, adapter_bytes, web_server
from tp_engine.messages import (
    AdapterAnswer,
    AdapterCall,
    AdapterList,
    AdapterReply,
    AdapterStatus,
    ListAdapters,
    LoadAdapter,
    ModelCard,
    Models,
)
from tp_engine.sources import AllowedSources
from tp_engine.text import Tokenizer

pytestmark = pytest.mark.anyio
BOTH = adapter_bytes()
NOT_ALLOWED = ("", " x", "a\x1b[0m", "x" * 257, "base:x", "x@deadbeef")


@pytest.fixture
def web() -> Iterator[Web]:
    with web_server() as web:
        for name, data in BOTH.items():
            web.files[f"team/x/{name}"] = data
        yield web


@pytest.fixture
async def api(
    client: EngineClient, tokenizer: Tokenizer, web: Web, tmp_path: Path
) -> AsyncIterator[httpx.AsyncClient]:
    """The control plane, with a store; the web server's ``team`` is allowed."""
    config = ServerConfig(
        admin_keys=ApiKeys(["admin"]),
        adapter_store=tmp_path,
        adapter_sources=AllowedSources([f"{web.url}/team", "http://127.0.0.1:1"]),
        max_adapter_bytes=10**6,
    )
    app = create_app(client, tokenizer, config)
    async with in_process(app) as http:
        http.headers["Authorization"] = "Bearer admin"
        yield http
        await app.state.services.loads.operations.close()


async def register(api: httpx.AsyncClient, name: str, source: str, **fields: Any) -> Any:
    answer = await api.post("/admin/adapters", json={"name": name, "source": source} | fields)
    assert answer.status_code == 202, answer.text
    begun = answer.json()
    assert answer.headers["location"] == f"/admin/operations/{begun['id']}"
    return begun


async def until(api: httpx.AsyncClient, begun: Any, *states: str) -> Any:
    """The operation once it has one of the states."""
    deadline = time.monotonic() + 10
    while True:
        seen = (await api.get(f"/admin/operations/{begun['id']}")).json()
        if seen["state"] in states:
            return seen
        assert time.monotonic() < deadline, seen
        await asyncio.sleep(0.01)


def claims(tmp_path: Path) -> list[Path]:
    return [*(tmp_path / "fetching" / "claims").iterdir()]


async def test_a_remote_adapter_is_fetched_and_handed_to_the_engine(
    api: httpx.AsyncClient, engine: FakeEngine, web: Web, tmp_path: Path
) -> None:
    found: dict[str, bytes] = {}

    def answer(call: AdapterCall) -> AdapterAnswer:
        assert isinstance(call, LoadAdapter)
        found.update({name: (Path(call.path) / name).read_bytes() for name in (CONFIG, WEIGHTS)})
        return AdapterReply(call_id=call.call_id, revision="ef" * 32, applied=7, expected=7)

    engine.answer = answer
    source = f"{web.url}/team/x"
    begun = await register(api, "x", source, replace=True)
    assert (begun["name"], begun["source"], begun["state"]) == ("x", source, "fetching")
    done = await until(api, begun, "ready", "failed")
    total = sum(map(len, BOTH.values()))
    assert (done["state"], done["bytes_done"], done["bytes_total"]) == ("ready", total, total)
    assert done["result"] == {
        "message": "Success: LoRA adapter 'x' added successfully.",
        "lora_name": "x",
        "revision": "ef" * 32,
        "modules_applied": 7,
        "modules_expected": 7,
    }
    assert done["error"] is None and done["ended"] >= done["created"]
    (call,) = engine.calls
    assert isinstance(call, LoadAdapter)
    assert (call.name, call.source, call.in_place) == ("x", source, True)
    assert found == BOTH and claims(tmp_path) == []


async def test_progress_is_told_in_bytes(api: httpx.AsyncClient, web: Web) -> None:
    web.before_body = lambda path: web.gate.clear() if path.endswith(CONFIG) else None
    begun = await register(api, "x", f"{web.url}/team/x")
    config = len(BOTH[CONFIG])
    deadline = time.monotonic() + 10
    while True:
        seen = await until(api, begun, "fetching")
        if seen["bytes_done"] == config + 150_000:
            break
        assert time.monotonic() < deadline, seen
        await asyncio.sleep(0.01)
    assert seen["bytes_total"] == sum(map(len, BOTH.values()))
    web.gate.set()
    await until(api, begun, "ready")


async def test_a_directory_of_the_host_is_an_operation_too(
    api: httpx.AsyncClient, engine: FakeEngine
) -> None:
    begun = await register(api, "x", "/srv/adapters/x")
    assert begun["state"] == "verifying"
    assert (await until(api, begun, "ready"))["bytes_total"] is None
    (call,) = engine.calls
    assert isinstance(call, LoadAdapter)
    assert (call.path, call.source, call.in_place) == ("/srv/adapters/x", "", False)


@pytest.mark.parametrize(
    ("source", "status", "code"),
    [
        ("s3://bucket/x", 400, "source_refused"),
        ("https://127.0.0.1/team/x", 400, "source_refused"),
        ("{url}/team/../x", 400, "source_refused"),
        ("hf://org/name", 400, "source_refused"),
    ],
)
async def test_a_source_that_is_not_allowed_is_refused_at_once(
    source: str, status: int, code: str, api: httpx.AsyncClient, web: Web, engine: FakeEngine
) -> None:
    body = {"name": "x", "source": source.format(url=web.url)}
    answer = await api.post("/admin/adapters", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    load = {"lora_name": "x", "lora_path": body["source"]}
    answer = await api.post("/v1/load_lora_adapter", json=load)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert not web.asked and not engine.calls


async def test_a_request_or_a_config_never_has_anything_fetched(
    api: httpx.AsyncClient, web: Web, engine: FakeEngine
) -> None:
    for model in (f"{web.url}/team/x", "org/name"):
        answer = await api.post("/v1/completions", json={"model": model, "prompt": "hi"})
        assert answer.status_code == 404
    named = f'{{"base_model_name_or_path": "{web.url}/team/base"}}'
    web.files[f"team/x/{CONFIG}"] = named.encode()
    await until(api, await register(api, "x", f"{web.url}/team/x"), "ready")
    assert {path for _, path, _ in web.asked} == {f"team/x/{CONFIG}", f"team/x/{WEIGHTS}"}


async def test_vllm_clients_wait_for_a_remote_adapter(
    api: httpx.AsyncClient, web: Web, engine: FakeEngine
) -> None:
    body = {"lora_name": "x", "lora_path": f"{web.url}/team/x"}
    answer = await api.post("/v1/load_lora_adapter", json=body)
    assert answer.status_code == 200 and answer.json()["revision"] == "cd" * 32
    body["lora_path"] = f"{web.url}/team/nothing"
    answer = await api.post("/v1/load_lora_adapter", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "source_missing")
    assert answer.json()["error"]["param"] == "lora_path"
    engine.answer = lambda call: AdapterReply(
        call_id=call.call_id, code="adapter_not_found", message="no x"
    )
    for path, param in (("/v1/unload_lora_adapter", "lora_name"), ("/admin/flush", "name")):
        answer = await api.post(path, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (404, param)


async def test_what_the_engine_refuses_has_failed(
    api: httpx.AsyncClient, web: Web, engine: FakeEngine, tmp_path: Path
) -> None:
    engine.answer = lambda call: AdapterReply(
        call_id=call.call_id, code="not_finite", message="tensor 'a' has 1 NaN"
    )
    done = await until(api, await register(api, "x", f"{web.url}/team/x"), "failed")
    assert done["result"] is None
    assert done["error"] == {
        "message": "tensor 'a' has 1 NaN",
        "type": "invalid_request_error",
        "param": "source",
        "code": "not_finite",
    }
    assert claims(tmp_path) == []


async def test_wrong_sums_fail(api: httpx.AsyncClient, web: Web, engine: FakeEngine) -> None:
    source = f"{web.url}/team/x"
    begun = await register(api, "x", source, sha256={WEIGHTS: "ab" * 32})
    assert (await until(api, begun, "failed"))["error"]["code"] == "checksum_mismatch"
    for where, sums in (
        (source, {"other.bin": "ab" * 32}),
        (source, {WEIGHTS: "xy" * 32}),
        ("/srv/x", {WEIGHTS: "ab" * 32}),
    ):
        body = {"name": "x", "source": where, "sha256": sums}
        answer = await api.post("/admin/adapters", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "sha256")
    assert not engine.calls


async def test_a_slow_or_dead_source_holds_up_no_other(
    api: httpx.AsyncClient, web: Web, engine: FakeEngine
) -> None:
    with web_server() as slow:
        slow.files |= {f"x/{name}": data for name, data in BOTH.items()}
        slow.gate.clear()
        app: Any = api._transport.app  # type: ignore[attr-defined]
        loads = app.state.services.loads
        loads.remote.allowed = AllowedSources([slow.url, web.url, "http://127.0.0.1:1"])
        held = [await register(api, f"slow-{i}", f"{slow.url}/x") for i in range(8)]
        dead = await register(api, "dead", "http://127.0.0.1:1/x")
        quick = await until(api, await register(api, "x", f"{web.url}/team/x"), "ready")
        assert quick["ended"] - quick["created"] < 5
        for begun in held:
            assert (await until(api, begun, "fetching"))["bytes_done"] <= len(BOTH[CONFIG])
        await api.post(f"/admin/operations/{dead['id']}/cancel")
        slow.gate.set()
        for begun in held:
            await until(api, begun, "ready")


async def test_one_operation_a_name(api: httpx.AsyncClient, engine: FakeEngine, web: Web) -> None:
    engine.gate.clear()
    begun = await register(api, "x", "/srv/x")
    source = f"{web.url}/team/x"
    for path, body in (
        ("/admin/adapters", {"name": "x", "source": source}),
        ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": source}),
    ):
        answer = await api.post(path, json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "adapter_loading")
    engine.gate.set()
    await until(api, begun, "ready")


async def test_a_name_is_one_however_it_is_spelt(
    api: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.gate.clear()
    begun = await register(api, "cafe\u0301", "/srv/x")
    again = await api.post("/admin/adapters", json={"name": "caf\u00e9", "source": "/srv/x"})
    assert begun["name"] == "caf\u00e9" and again.status_code == 409
    engine.gate.set()
    await until(api, begun, "ready")


async def test_of_many_loads_at_once_each_name_has_one(
    api: httpx.AsyncClient, engine: FakeEngine, web: Web
) -> None:
    source = f"{web.url}/team/x"
    names = ["same"] * 50 + [f"other-{i}" for i in range(50)]
    bodies = [{"name": name, "source": source} for name in names]
    answers = await asyncio.gather(*(api.post("/admin/adapters", json=each) for each in bodies))
    codes = [answer.status_code for answer in answers]
    assert codes[:50].count(202) == 1 and codes[:50].count(409) == 49 and codes[50:] == [202] * 50
    for answer in answers:
        if answer.status_code == 202:
            await until(api, answer.json(), "ready")
    loaded = sorted(call.name for call in engine.calls if isinstance(call, LoadAdapter))
    assert loaded == sorted(set(names))


async def test_a_name_that_cannot_be_had_is_refused_before_anything_is_fetched(
    api: httpx.AsyncClient, web: Web, engine: FakeEngine
) -> None:
    refusals = [
        ("team/sql-lora", False, "adapter_exists"),
        ("base", False, "name_refused"),
        ("base", True, "name_refused"),
        *((name, True, "name_refused") for name in NOT_ALLOWED),
    ]
    for name, replace, code in refusals:
        source = f"{web.url}/team/x"
        body = {"name": name, "source": source, "replace": replace}
        answer = await api.post("/admin/adapters", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)
        load = {"lora_name": name, "lora_path": source, "load_inplace": replace}
        error = (await api.post("/v1/load_lora_adapter", json=load)).json()["error"]
        assert (error["code"], error["param"]) == (code, "lora_name")
    assert not web.asked and not engine.calls
    assert (await api.get("/admin/operations")).json() == {"operations": []}


async def test_a_fetch_can_be_cancelled_and_taken_up(
    api: httpx.AsyncClient, web: Web, engine: FakeEngine, tmp_path: Path
) -> None:
    web.before_body = lambda path: web.gate.clear() if path.endswith(CONFIG) else None
    begun = await register(api, "x", f"{web.url}/team/x")
    while (await until(api, begun, "fetching"))["bytes_done"] < 100_000:
        await asyncio.sleep(0.01)
    answer = await api.post(f"/admin/operations/{begun['id']}/cancel")
    assert answer.status_code == 202
    done = await until(api, begun, "cancelled")
    assert done["error"] is None and done["result"] is None
    web.before_body = None
    web.gate.set()
    while claims(tmp_path):
        await asyncio.sleep(0.01)
    sent = web.sent
    assert not engine.calls
    await until(api, await register(api, "x", f"{web.url}/team/x"), "ready")
    assert web.sent - sent <= 150_000


async def test_what_is_cancelled_before_it_begins_has_ended() -> None:
    async def work(operation: operations.Operation) -> Done:
        raise AssertionError("it began")

    table = operations.Operations()
    begun = table.begin("x", "s3://bucket/x", "fetching", work)
    table.cancel(begun.id)
    with pytest.raises(Conflict, match="was cancelled"):
        await begun.finished()
    assert begun.state == "cancelled" and begun.ended is not None
    table.check_free("x")


async def test_what_is_over_says_since_when() -> None:
    async def work(operation: operations.Operation) -> Done:
        raise Conflict("no")

    begun = operations.Operations().begin("x", "s3://bucket/x", "fetching", work)
    while (seen := begun.status()).state == "fetching":
        assert seen.ended is None
        await asyncio.sleep(0)
    assert seen.state == "failed" and seen.ended is not None


async def test_what_is_verified_is_not_cancelled(
    api: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.gate.clear()
    begun = await register(api, "x", "/srv/x")
    answer = await api.post(f"/admin/operations/{begun['id']}/cancel")
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "not_cancellable")
    engine.gate.set()
    await until(api, begun, "ready")
    again = await api.post(f"/admin/operations/{begun['id']}/cancel")
    assert again.json()["state"] == "ready"


async def test_operations_are_listed_in_pages(api: httpx.AsyncClient) -> None:
    begun = [await register(api, f"x{i}", f"/srv/{i}") for i in range(4)]
    for each in begun:
        await until(api, each, "ready")
    ids = [each["id"] for each in begun]

    async def listed(query: str) -> list[str]:
        page = (await api.get(f"/admin/operations?{query}")).json()
        return [each["id"] for each in page["operations"]]

    assert await listed("") == ids
    assert await listed("limit=2") == ids[:2]
    assert await listed(f"limit=2&after={ids[1]}") == ids[2:]
    assert await listed("state=failed") == [] and await listed("state=ready") == ids
    assert await listed("name=x2") == [ids[2]]
    for query, status in (
        ("limit=0", 400),
        ("limit=" + "9" * 5000, 400),
        ("state=odd", 400),
        ("after=nothing", 404),
    ):
        assert (await api.get(f"/admin/operations?{query}")).status_code == status
    assert (await api.get("/admin/operations/op-9-none")).status_code == 404


async def test_a_bounded_number_is_open_and_remembered(
    api: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations, "MAX_OPEN", 3)
    monkeypatch.setattr(operations, "MAX_ENDED", 2)
    engine.gate.clear()
    begun = [await register(api, f"x{i}", f"/srv/{i}") for i in range(3)]
    answer = await api.post("/admin/adapters", json={"name": "y", "source": "/srv/y"})
    assert answer.status_code == 503 and answer.headers["retry-after"]
    engine.gate.set()
    await until(api, begun[2], "ready")
    while len((await api.get("/admin/operations")).json()["operations"]) > 2:
        await asyncio.sleep(0.01)
    assert (await api.get(f"/admin/operations/{begun[0]['id']}")).status_code == 404


async def test_an_engine_that_is_lost_fails_what_is_open(
    api: httpx.AsyncClient, client: EngineClient, engine: FakeEngine
) -> None:
    engine.gate.clear()
    begun = await register(api, "x", "/srv/x")
    client.engine_died("it fell")
    done = await until(api, begun, "failed")
    assert done["error"]["code"] == "engine_dead"
    answer = await api.post("/admin/adapters", json={"name": "y", "source": "/srv/y"})
    assert answer.status_code == 503


async def test_without_a_store_nothing_is_fetched_or_uploaded(
    client: EngineClient, tokenizer: Tokenizer, web: Web
) -> None:
    config = ServerConfig(
        admin_keys=ApiKeys(["admin"]), adapter_sources=AllowedSources([f"{web.url}/team"])
    )
    async with in_process(create_app(client, tokenizer, config)) as http:
        http.headers["Authorization"] = "Bearer admin"
        body = {"name": "x", "source": f"{web.url}/team/x"}
        answer = await http.post("/admin/adapters", json=body)
        assert answer.status_code == 400 and "--adapter-store" in answer.text
        answer = await http.post("/admin/adapters/x/upload", files={CONFIG: b"{}"})
        assert answer.json()["error"]["code"] == "no_store"


async def test_only_operators_may_look_or_begin(api: httpx.AsyncClient) -> None:
    del api.headers["Authorization"]
    for method, path in (("GET", ""), ("GET", "/op-1"), ("POST", "/op-1/cancel")):
        assert (await api.request(method, f"/admin/operations{path}")).status_code == 401
    assert (await api.post("/admin/adapters", json={})).status_code == 401
    assert (await api.post("/admin/adapters/x/upload")).status_code == 401


async def test_what_is_on_its_way_is_listed_beside_what_is_served(
    api: httpx.AsyncClient, engine: FakeEngine, web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = [
        AdapterStatus(name="b", source="/srv/b"),
        AdapterStatus(name="c", state="failed", reason="damaged"),
        AdapterStatus(name="team/sql-lora", source="/srv/sql"),
    ]
    asked: list[ListAdapters] = []

    def answer(call: AdapterCall) -> AdapterAnswer:
        if isinstance(call, LoadAdapter):
            return AdapterReply(call_id=call.call_id, code="not_finite", message="a NaN")
        assert isinstance(call, ListAdapters)
        asked.append(call)
        found = [each for each in served if call.name in (None, each.name)]
        return AdapterList(call_id=call.call_id, adapters=found[: call.limit])

    async def listed(query: str = "") -> dict[str, str]:
        page = (await api.get(f"/admin/adapters?{query}")).json()
        return {each["name"]: each["state"] for each in page["adapters"]}

    engine.answer = answer
    bad = await register(api, "bad", "/srv/bad")
    await until(api, bad, "failed")
    web.gate.clear()
    source = f"{web.url}/team/x"
    for name in ("a", "c", "d", "team/sql-lora"):
        await register(api, name, source, replace=True)
    assert await listed() == {
        "a": "fetching",
        "b": "ready",
        "bad": "failed",
        "c": "fetching",
        "d": "fetching",
        "team/sql-lora": "ready",
    }
    assert list(await listed("limit=2")) == ["a", "b"]
    assert list(await listed("prefix=b&limit=5"))[:2] == ["b", "bad"]
    assert list(await listed("state=fetching")) == ["a", "c", "d"]
    call = asked[-1]
    assert (call.prefix, call.state) == ("b", "") and len(asked) == 3
    shown = (await api.get("/admin/adapters/team/sql-lora")).json()
    assert shown["state"] == "ready" and shown["operation"].startswith("op-")
    coming = (await api.get("/admin/adapters/a")).json()
    assert (coming["state"], coming["source"]) == ("fetching", source)
    failed = (await api.get("/admin/adapters/bad")).json()
    assert (failed["reason"], failed["operation"]) == ("a NaN", bad["id"])
    assert (await api.get("/admin/adapters/nobody")).status_code == 404
    monkeypatch.setattr(listing, "FAILED_SECONDS", 0.0)
    assert (await api.get("/admin/adapters/bad")).status_code == 404
    assert (await api.get("/admin/adapters?state=odd")).json()["error"]["param"] == "state"
    web.gate.set()


async def test_a_failed_replacement_is_no_failed_adapter(
    api: httpx.AsyncClient, client: EngineClient, engine: FakeEngine
) -> None:
    held = ModelCard(name="held", root="/srv/h", parent="base", revision="ef" * 32, held=True)
    await engine.send(Models(models=[*MODELS, held], max_model_len=512))
    await client.wait_for(lambda: held in client.require_serving().models)
    assert "held" not in (await api.get("/v1/models")).text
    assert (await api.get("/v1/models/held")).status_code == 404
    again = await api.post("/admin/adapters", json={"name": "held", "source": "/srv/x"})
    assert (again.status_code, again.json()["error"]["code"]) == (400, "adapter_exists")
    engine.answer = lambda call: AdapterReply(call_id=call.call_id, code="not_finite", message="")
    for name in ("held", "team/sql-lora", "new"):
        await until(api, await register(api, name, "/srv/x", replace=True), "failed")
    engine.answer = lambda call: AdapterList(call_id=call.call_id, adapters=[])
    await engine.send(Models(models=MODELS[:1], max_model_len=512))  # all are unloaded
    await client.wait_for(lambda: len(client.require_serving().models) == 1)
    for query in ("", "?state=failed"):
        page = (await api.get(f"/admin/adapters{query}")).json()
        assert [each["name"] for each in page["adapters"]] == ["new"]
