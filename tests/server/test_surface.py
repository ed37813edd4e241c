"""Models, health, readiness, metrics, keys and limits."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import msgspec
import pytest
from fastapi import FastAPI, Request
from prometheus_client.parser import text_string_to_metric_families

import server
from server import EngineClient, ServerConfig, create_app
from server.auth import ApiKeys
from server.body import read_body
from server.metrics import HttpMetrics
from server.openai.generation import Generation, Job
from tests.server.conftest import Api, in_process
from tests.server.fake_engine import FakeEngine
from tests.server.sse import error
from tp_engine.messages import Draining, Phase, Stats
from tp_engine.params import SamplingParams
from tp_engine.text import Tokenizer

pytestmark = pytest.mark.anyio


async def test_exported_names() -> None:
    assert set(server.__all__) == {
        "ApiError",
        "EngineClient",
        "FrontEndSettings",
        "ServerConfig",
        "create_app",
        "start_front_end",
    }
    for name in server.__all__:
        assert getattr(server, name).__name__ == name
    with pytest.raises(AttributeError, match="nothing"):
        server.nothing  # noqa: B018 - the access is the test


async def test_models_name_source_and_base(api: Api) -> None:
    body = (await api.http.get("/v1/models")).json()
    assert body["object"] == "list"
    base, adapter = body["data"]
    assert (base["id"], base["root"], base["parent"]) == ("base", "/models/base", None)
    assert (adapter["id"], adapter["parent"]) == ("team/sql-lora", "base")
    assert adapter["root"] == "/adapters/sql"
    assert {base["object"], adapter["object"]} == {"model"}
    for name in ("team/sql-lora", "team%2Fsql-lora"):
        assert (await api.http.get(f"/v1/models/{name}")).json() == adapter


async def test_start_up_is_visible(engine: FakeEngine, tokenizer: Tokenizer) -> None:
    async with (
        EngineClient(engine.to_engine, engine.to_front_end) as client,
        in_process(create_app(client, tokenizer, ServerConfig())) as http,
    ):
        await engine.send(Phase(name="loading weights"))
        await client.wait_for(lambda: client.phase == "loading weights")
        health = await http.get("/health")
        assert (health.status_code, health.json()["phase"]) == (200, "loading weights")
        for response in (
            await http.get("/ready"),
            await http.get("/v1/models"),
            await http.post("/v1/completions", json={"model": "base", "prompt": "a"}),
        ):
            found = error(response, 503)
            assert found["code"] == "not_ready" and "loading weights" in found["message"]
        await engine.announce()
        await client.wait_for(lambda: client.ready is not None)
        assert (await http.get("/ready")).status_code == 200


async def test_probes_may_ask_for_the_status_alone(api: Api, client: EngineClient) -> None:
    for path in ("/health", "/ready"):
        assert (await api.http.head(path)).status_code == 200
    client.engine_died("rank 1 is gone")
    for path in ("/health", "/ready"):
        assert (await api.http.head(path)).status_code == 503


async def test_draining_refuses_new_requests_and_finishes_open_ones(
    api: Api, engine: FakeEngine, client: EngineClient
) -> None:
    engine.gate.clear()
    open_one = asyncio.create_task(api.complete(prompt="a", max_tokens=3))
    while not engine.submits:
        await asyncio.sleep(0.005)
    await engine.send(Draining())
    await client.wait_for(lambda: client.draining)
    assert error(await api.http.get("/ready"), 503)["code"] == "shutting_down"
    assert error(await api.complete(prompt="a"), 503)["code"] == "shutting_down"
    assert (await api.http.get("/health")).status_code == 200
    engine.gate.set()
    assert (await open_one).json()["choices"][0]["text"] == "aaa"


async def test_a_lost_engine_is_unhealthy(api: Api, client: EngineClient) -> None:
    client.engine_died("rank 1 is gone")
    for path in ("/health", "/ready"):
        found = error(await api.http.get(path), 503)
        assert (found["code"], found["message"]) == ("engine_dead", "rank 1 is gone")


async def samples(api: Api) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    response = await api.http.get("/metrics")
    assert response.status_code == 200
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


async def test_metrics_keep_the_names_that_gateways_read(
    api: Api, engine: FakeEngine, client: EngineClient
) -> None:
    assert (await samples(api))[("vllm:num_requests_waiting", ())] == 0
    gauges = {"num_requests_running": 3, "num_requests_waiting": 2, "kv_cache_usage_perc": 0.5}
    await engine.send(
        Stats(
            gauges={**gauges, "arena_pages_free": 9},
            counters={"generated_tokens": 70},
            running_adapters=["a", "b"],
            waiting_adapters=["c"],
            max_adapters=8,
        )
    )
    await client.wait_for(lambda: client.stats is not None)
    found = await samples(api)
    for name, value in gauges.items():
        assert found[(f"vllm:{name}", ())] == value
    assert found[("tp_engine:arena_pages_free", ())] == 9
    assert found[("tp_engine:generated_tokens_total", ())] == 70
    labels = {"max_lora": "8", "running_lora_adapters": "a,b", "waiting_lora_adapters": "c"}
    assert found[("vllm:lora_requests_info", tuple(sorted(labels.items())))] > 0


async def test_requests_are_timed_and_counted_by_route(api: Api) -> None:
    await api.complete(prompt="a", max_tokens=4)
    await api.complete(prompt="a", max_tokens=4, stream=True)
    await api.http.get("/no/such/path")
    await api.http.get("/v1/models/base")
    found = await samples(api)
    for name in ("time_to_first_token", "time_per_output_token", "request_latency"):
        assert found[(f"tp_engine:{name}_seconds_count", ())] == 2
    counts = {
        dict(labels)["route"]: value
        for (name, labels), value in found.items()
        if name == "tp_engine:http_requests_total"
    }
    assert counts["/v1/completions"] == 2
    assert counts["other"] == 1
    assert not any("no/such" in route for route in counts)


async def test_a_client_that_reads_late_is_not_a_slow_answer(
    client: EngineClient, tokenizer: Tokenizer
) -> None:
    job = Job(
        id="a", model="base", prompts=[[5]], n=1, params=SamplingParams(max_tokens=4), salt="",
        wait_for_adapter=True, skip_special_tokens=True, continues=True,
    )  # fmt: skip
    metrics = HttpMetrics(client)
    begun = time.perf_counter()
    generation = Generation(job, client, tokenizer, metrics)
    while client.open_requests:
        await asyncio.sleep(0.005)
    arrived = time.perf_counter() - begun
    await asyncio.sleep(0.05)
    assert [delta async for delta in generation.deltas()]
    for name in ("time_to_first_token", "time_per_output_token", "request_latency"):
        seconds = metrics.registry.get_sample_value(f"tp_engine:{name}_seconds_sum")
        assert seconds is not None and 0 <= seconds <= arrived, name


async def test_applications_share_no_metrics(client: EngineClient, tokenizer: Tokenizer) -> None:
    for _ in range(2):
        async with in_process(create_app(client, tokenizer, ServerConfig())) as http:
            await http.get("/health")
            found = await samples(Api(http))
            labels = (("route", "/health"), ("status", "200"))
            assert found[("tp_engine:http_requests_total", labels)] == 1


@pytest.fixture
async def guarded(client: EngineClient, tokenizer: Tokenizer) -> AsyncIterator[httpx.AsyncClient]:
    config = ServerConfig(api_keys=ApiKeys(["first", "sec\u00f6nd"]))
    async with in_process(create_app(client, tokenizer, config)) as http:
        yield http


@pytest.mark.parametrize("key", [b"first", "sec\u00f6nd".encode()])
async def test_keys_open_the_api(guarded: httpx.AsyncClient, key: bytes) -> None:
    for scheme in (b"Bearer ", b"bearer "):
        response = await guarded.get("/v1/models", headers={b"authorization": scheme + key})
        assert response.status_code == 200


@pytest.mark.parametrize("header", [None, "", "first", "Bearer", "Bearer ", "Basic first"])
async def test_missing_keys_are_refused(guarded: httpx.AsyncClient, header: str | None) -> None:
    headers = {} if header is None else {"authorization": header}
    response = await guarded.get("/v1/models", headers=headers)
    assert error(response, 401)["code"] == "invalid_api_key"
    assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("key", ["firs", "first ", "First", "firstsec", "#"])
async def test_wrong_keys_are_refused_and_never_repeated(
    guarded: httpx.AsyncClient, key: str
) -> None:
    response = await guarded.get("/v1/models", headers={"authorization": f"Bearer x{key}"})
    error(response, 401)
    assert f"x{key}" not in response.text


async def test_probes_need_no_key_and_everything_else_does(guarded: httpx.AsyncClient) -> None:
    for path in ("/health", "/ready", "/metrics"):
        assert (await guarded.get(path)).status_code == 200
    for path in ("/v1/models", "/v1/nope", "/", "/docs", "/health/", "//health"):
        error(await guarded.get(path), 401)


ORIGIN = "https://chat.example.org"
PREFLIGHT = {
    "origin": ORIGIN,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}
ALLOW = "access-control-allow-origin"


async def test_browsers_may_call_from_the_origins_that_are_named(
    client: EngineClient, tokenizer: Tokenizer
) -> None:
    keys = ApiKeys(["key"])
    for allowed, shown in (((ORIGIN, "http://b"), ORIGIN), (("*",), "*"), (("http://b",), None)):
        config = ServerConfig(api_keys=keys, allowed_origins=allowed)
        async with in_process(create_app(client, tokenizer, config)) as http:
            asked = await http.options("/v1/completions", headers=PREFLIGHT)
            assert (asked.status_code, asked.headers.get(ALLOW)) == (200 if shown else 400, shown)
            for key, status in (("key", 200), ("wrong", 401)):
                headers = {"origin": ORIGIN, "authorization": f"Bearer {key}"}
                answer = await http.get("/v1/models", headers=headers)
                assert (answer.status_code, answer.headers.get(ALLOW)) == (status, shown)
                assert "access-control-allow-credentials" not in answer.headers


async def test_browsers_may_call_from_no_origin_unless_told(guarded: httpx.AsyncClient) -> None:
    error(await guarded.options("/v1/completions", headers=PREFLIGHT), 401)
    answer = await guarded.get("/health", headers={"origin": ORIGIN})
    assert answer.status_code == 200 and ALLOW not in answer.headers


async def test_key_files_hold_one_key_a_line(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# team a\nalpha\n\n  beta  \n#gamma\n", "utf-8")
    keys = ApiKeys.from_file(file)
    assert keys.accepts(b"alpha") and keys.accepts(b"beta")
    file.write_text("alpha\n", "utf-8-sig")
    assert ApiKeys.from_file(file).accepts(b"alpha"), "some editors begin a file with a mark"
    assert not any(keys.accepts(key) for key in (b"", b"gamma", b"#gamma", b"# team a"))


@pytest.mark.parametrize("content", ["", "# only a comment\n", None])
async def test_key_files_without_a_key_are_refused(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_text(content, "utf-8")
    with pytest.raises(ValueError, match="keys"):
        ApiKeys.from_file(file)


async def test_declared_long_bodies_are_refused_unread(app: FastAPI, api: Api) -> None:
    read = 0

    async def content() -> AsyncIterator[bytes]:
        nonlocal read
        read += 1
        yield b"x"

    headers = {"content-length": str(64 * 2**20)}
    response = await api.http.post("/v1/completions", content=content(), headers=headers)
    assert error(response, 413)["code"] == "request_too_large"
    assert read == 0


async def test_undeclared_long_bodies_are_refused_at_the_limit(api: Api) -> None:
    read = 0

    async def content() -> AsyncIterator[bytes]:
        nonlocal read
        for _ in range(64):
            read += 2**18
            yield b"x" * 2**18

    error(await api.http.post("/v1/completions", content=content()), 413)
    assert read <= 2**20 + 2**19


async def test_values_of_a_body_are_not_gone_through_while_they_are_made(
    app: FastAPI, api: Api
) -> None:
    collects = []

    def decode(body: bytes) -> int:
        collects.append(gc.isenabled())
        return msgspec.json.decode(body, type=int)

    async def read(request: Request) -> str:
        return str(await read_body(request, decode))

    app.add_api_route("/read", read, methods=["POST"])
    for content, status in ((b"5", 200), (b"x", 400), (b'"x"', 400)):
        assert (await api.http.post("/read", content=content)).status_code == status
        assert gc.isenabled()
    assert collects == [False] * 3


async def test_bodies_up_to_the_limit_are_read(api: Api) -> None:
    content = b'{"model": "base", "prompt": "a", "x": "' + b"x" * (2**20 - 41) + b'"}'
    assert len(content) == 2**20
    assert (await api.http.post("/v1/completions", content=content)).status_code == 200
    error(await api.http.post("/v1/completions", content=content + b" "), 413)
