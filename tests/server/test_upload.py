"""Adapters as multipart bodies: on disk as they come, whole or refused."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from starlette.requests import ClientDisconnect

from server.admin import parts as parts_of_bodies
from server.admin import upload
from tests.server.fake_engine import FakeEngine
from tests.server.test_operations import NOT_ALLOWED, claims, until
from tests.sources.web import CONFIG, WEIGHTS, adapter_bytes
from tp_engine.messages import AdapterAnswer, AdapterCall, AdapterReply, LoadAdapter
from tp_engine.sources import Claim

pytestmark = pytest.mark.anyio
BOTH = adapter_bytes()
FORM = "multipart/form-data; boundary=b"


def parts(content: dict[str, bytes]) -> dict[str, Any]:
    return {f"file{number}": item for number, item in enumerate(content.items())}


async def post(operator: httpx.AsyncClient, path: str = "x", **options: Any) -> httpx.Response:
    return await operator.post(f"/admin/adapters/{path}/upload", **options)


def code(answer: httpx.Response) -> tuple[int, str | None]:
    return answer.status_code, answer.json()["error"]["code"]


@pytest.mark.parametrize("path", ["x", "team/x"])
async def test_what_is_uploaded_is_handed_to_the_engine_and_gone(
    path: str, operator: httpx.AsyncClient, engine: FakeEngine, tmp_path: Path
) -> None:
    found: dict[str, bytes] = {}

    def answer(call: AdapterCall) -> AdapterAnswer:
        assert isinstance(call, LoadAdapter)
        found.update({name: (Path(call.path) / name).read_bytes() for name in (CONFIG, WEIGHTS)})
        return AdapterReply(call_id=call.call_id, revision="ef" * 32)

    engine.answer = answer
    begun = await post(operator, f"{path}", files=parts(BOTH), params={"replace": "true"})
    assert begun.status_code == 202, begun.text
    done = await until(operator, begun.json(), "ready", "failed")
    assert (done["state"], done["name"], done["source"]) == ("ready", path, "uploaded")
    (call,) = engine.calls
    assert isinstance(call, LoadAdapter)
    assert (call.name, call.source, call.in_place) == (path, "uploaded", True)
    assert found == BOTH and claims(tmp_path) == []


async def test_a_parts_name_stands_for_its_file_name(
    operator: httpx.AsyncClient, engine: FakeEngine
) -> None:
    boundary = "b"
    body = b"".join(
        f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n'.encode()
        + data
        + b"\r\n"
        for name, data in BOTH.items()
    )
    content = body + f"--{boundary}--\r\n".encode()
    headers = {"content-type": f"multipart/form-data; boundary={boundary}"}
    begun = await post(operator, content=content, headers=headers)
    assert begun.status_code == 202, begun.text
    await until(operator, begun.json(), "ready")
    cut = await post(operator, "y", content=content[:-8], headers=headers)
    assert cut.status_code == 400 and "ends before its last boundary" in cut.text
    assert len(engine.calls) == 1


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({CONFIG: b"{}"}, "has no part adapter_model.safetensors"),
        ({WEIGHTS: BOTH[WEIGHTS]}, "has no part adapter_config.json"),
        (BOTH | {"adapter_model.bin": b"x"}, "part 'adapter_model.bin' must be adapter_config"),
        (BOTH | {"../evil": b"x"}, "part '../evil' must be"),
        ({CONFIG: b"{}", WEIGHTS: b"\xff" * 9}, "has a header of 18446744073709551615 bytes"),
        ({CONFIG: b"{}", WEIGHTS: b"version https://git-lfs"}, "is a git-lfs pointer"),
    ],
)
async def test_what_is_no_adapter_is_refused_and_nothing_stays(
    content: dict[str, bytes],
    reason: str,
    operator: httpx.AsyncClient,
    engine: FakeEngine,
    tmp_path: Path,
) -> None:
    answer = await post(operator, files=parts(content))
    assert answer.status_code == 400 and reason in answer.text, answer.text
    assert not engine.calls and claims(tmp_path) == []
    assert not (tmp_path / "fetching" / "evil").exists()


async def test_a_file_that_is_there_twice_is_refused(operator: httpx.AsyncClient) -> None:
    twice = [("a", (CONFIG, b"{}")), ("b", (CONFIG, b"{}"))]
    answer = await post(operator, files=twice)
    assert answer.status_code == 400 and "is there twice" in answer.text


@pytest.mark.parametrize(
    ("content_type", "reason"),
    [
        ("application/json", "must be multipart/form-data"),
        ("multipart/form-data", "must be multipart/form-data with a boundary"),
        ("multipart/form-data; boundary=x", "is not valid multipart/form-data"),
    ],
)
async def test_a_body_in_another_form_is_refused(
    content_type: str, reason: str, operator: httpx.AsyncClient, tmp_path: Path
) -> None:
    answer = await post(operator, content=b"{}", headers={"content-type": content_type})
    assert answer.status_code == 400 and reason in answer.text
    assert claims(tmp_path) == []


async def test_bodies_over_the_limit_are_refused_declared_or_not(
    operator: httpx.AsyncClient, engine: FakeEngine, tmp_path: Path
) -> None:
    big = {CONFIG: b"{}", WEIGHTS: adapter_bytes(size=500_000)[WEIGHTS]}
    declared = await post(operator, files=parts(big))
    assert code(declared) == (413, "request_too_large")
    request = operator.build_request("POST", "/admin/adapters/x/upload", files=parts(big))
    content = request.read()

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(content), 50_000):
            yield content[start : start + 50_000]

    headers = {"content-type": request.headers["content-type"]}
    undeclared = await post(operator, content=pieces(), headers=headers)
    assert code(undeclared) == (413, "request_too_large")
    assert not engine.calls and claims(tmp_path) == []
    other = await operator.post("/admin/adapters", content=b" " * 2000)
    assert code(other) == (413, "request_too_large")


async def test_a_config_has_a_limit_of_its_own(
    operator: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts_of_bodies, "MAX_CONFIG_BYTES", 1000)
    answer = await post(operator, files=parts(BOTH | {CONFIG: b" " * 1001}))
    assert code(answer) == (413, "request_too_large") and CONFIG in answer.text


async def test_what_is_refused_is_deleted_beside_the_event_loop(
    operator: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    threads = []
    release = Claim.release

    def recorded(claim: Claim, *, keep: bool) -> None:
        threads.append(threading.current_thread())
        release(claim, keep=keep)

    monkeypatch.setattr(Claim, "release", recorded)
    assert (await post(operator, files=parts({CONFIG: b"{}"}))).status_code == 400
    assert len(threads) == 1 and threading.main_thread() not in threads
    assert claims(tmp_path) == []


async def test_a_client_that_leaves_leaves_nothing(
    operator: httpx.AsyncClient, engine: FakeEngine, tmp_path: Path
) -> None:
    content = operator.build_request("POST", "/", files=parts(BOTH))
    body, seen = content.read(), asyncio.Event()

    async def breaks() -> AsyncIterator[bytes]:
        yield body[:200_000]
        while not claims(tmp_path):
            await asyncio.sleep(0.01)
        seen.set()
        raise ClientDisconnect

    headers = {"content-type": content.headers["content-type"]}
    assert (await post(operator, content=breaks(), headers=headers)).status_code == 499
    assert seen.is_set() and not engine.calls and claims(tmp_path) == []


async def test_a_loaded_or_busy_name_is_refused_before_the_body(
    operator: httpx.AsyncClient, engine: FakeEngine
) -> None:
    assert code(await post(operator, "team/sql-lora", files=parts(BOTH))) == (400, "adapter_exists")
    engine.gate.clear()
    begun = await post(operator, files=parts(BOTH))
    assert code(await post(operator, files=parts(BOTH))) == (409, "adapter_loading")
    engine.gate.set()
    await until(operator, begun.json(), "ready")


@pytest.mark.parametrize("action", ["upload", "tensors"])
@pytest.mark.parametrize("name", [name for name in NOT_ALLOWED if name])
async def test_a_name_that_is_not_allowed_is_refused_before_the_body(
    action: str, name: str, operator: httpx.AsyncClient, engine: FakeEngine, tmp_path: Path
) -> None:
    read: list[bytes] = []

    async def body() -> AsyncIterator[bytes]:
        read.append(b"x")
        yield b"x"

    path = f"/admin/adapters/{quote(name)}/{action}"
    answer = await operator.post(path, content=body(), headers={"content-type": FORM})
    assert code(answer) == (400, "name_refused") and answer.json()["error"]["param"] == "name"
    assert not read and not engine.calls and claims(tmp_path) == []


async def test_replace_is_true_or_false_and_nothing_else(
    operator: httpx.AsyncClient, engine: FakeEngine
) -> None:
    address = "/admin/adapters/team/sql-lora/upload"
    answer = await operator.post(address, params={"replace": "yes"}, files=parts(BOTH))
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "replace"
    assert not engine.calls


async def test_a_bounded_number_is_received_at_a_time(
    operator: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "_receiving", asyncio.Semaphore(0))
    answer = await post(operator, files=parts(BOTH))
    assert answer.status_code == 503 and "uploads" in answer.text
