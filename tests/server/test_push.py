"""Pushes over HTTP: the files reach the engine, or nothing is left of them."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from server import EngineClient, ServerConfig, create_app
from server.auth import ApiKeys
from tests.server.conftest import MAX_ADAPTER_BYTES, in_process
from tests.server.fake_engine import FakeEngine
from tests.server.test_operations import claims
from tests.sources.web import CONFIG, WEIGHTS, adapter_bytes
from tp_engine.messages import AdapterCall, AdapterReply, PushAdapter
from tp_engine.text import Tokenizer

pytestmark = pytest.mark.anyio
BOTH = adapter_bytes()


async def test_the_engine_gets_the_files_and_says_whether_they_last(
    operator: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.answer = lambda call: AdapterReply(call_id=call.call_id, revision="r", durable=False)
    answer = await operator.post("/admin/adapters/team/x/tensors", files=BOTH)
    assert answer.status_code == 200, answer.text
    assert (answer.json()["lora_name"], answer.json()["durable"]) == ("team/x", False)
    (call,) = engine.calls
    assert isinstance(call, PushAdapter) and call.name == "team/x"
    found = {name: (Path(call.directory) / name).read_bytes() for name in (CONFIG, WEIGHTS)}
    assert found == BOTH, "they are the engine's now, for it to delete"


async def test_a_refusal_of_the_engine_is_the_answer(
    operator: httpx.AsyncClient, engine: FakeEngine
) -> None:
    for code, status in (
        ("adapter_too_large", 400),
        ("adapter_loading", 409),
        ("out_of_memory", 503),
    ):

        def refuse(call: AdapterCall, code: str = code) -> AdapterReply:
            return AdapterReply(call_id=call.call_id, code=code, message="no")

        engine.answer = refuse
        answer = await operator.post("/admin/adapters/x/tensors", files=BOTH)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_push_over_the_limit_leaves_nothing(
    chunked: bool, operator: httpx.AsyncClient, engine: FakeEngine, tmp_path: Path
) -> None:
    request = operator.build_request(
        "POST",
        "/admin/adapters/x/tensors",
        files={CONFIG: BOTH[CONFIG], WEIGHTS: b"\\0" * MAX_ADAPTER_BYTES * 2},
    )
    if chunked:
        del request.headers["content-length"]
        request.headers["transfer-encoding"] = "chunked"
    answer = await operator.send(request)
    assert answer.status_code in (400, 413), answer.text
    assert claims(tmp_path) == [] and engine.calls == []


async def test_without_a_store_nothing_can_be_pushed(
    client: EngineClient, tokenizer: Tokenizer
) -> None:
    config = ServerConfig(admin_keys=ApiKeys(["admin"]))
    async with in_process(create_app(client, tokenizer, config)) as http:
        http.headers["Authorization"] = "Bearer admin"
        answer = await http.post("/admin/adapters/x/tensors", files=BOTH)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "no_store")
