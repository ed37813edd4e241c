"""Every request that cannot be served fails alone, early, and in one shape."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi import FastAPI

from server import engine_client
from server.errors import failure
from server.openai.generation import Job
from tests.server.conftest import Api
from tests.server.fake_engine import CONTEXT, FakeEngine
from tests.server.sse import error
from tp_engine.text import Tokenizer

pytestmark = pytest.mark.anyio
PATHS = ("/v1/completions", "/v1/chat/completions")
JSON = {"content-type": "application/json"}


def body(**fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "hi"}]
    return {"model": "base", "prompt": "hi", "messages": messages} | fields


BAD_VALUES: list[tuple[str, Any]] = [
    ("temperature", -1),
    ("temperature", 101),
    ("temperature", "1"),
    ("top_p", 0),
    ("top_p", 2),
    ("top_p", -0.1),
    ("min_p", 1.5),
    ("top_k", -2),
    ("top_k", 1.5),
    ("repetition_penalty", 0),
    ("presence_penalty", 3),
    ("frequency_penalty", -2.5),
    ("n", 0),
    ("n", 100000),
    ("n", True),
    ("best_of", 2),
    ("max_tokens", 0),
    ("max_tokens", 10**9),
    ("max_tokens", -5),
    ("min_tokens", -1),
    ("min_tokens", 10**6),
    ("seed", 2**63),
    ("seed", "x"),
    ("stop", [""]),
    ("stop", ["x"] * 17),
    ("stop", 5),
    ("stop", "x" * 2000),
    ("stop_token_ids", [10**9]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", ["x"]),
    ("stop_token_ids", [5] * 1025),
    ("logit_bias", {"1000000000": 1}),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"5": 101}),
    ("logit_bias", {"5": "x"}),
    ("logit_bias", [5]),
    ("logit_bias", {"\u0665": 1}),
    ("stream", "yes"),
    ("stream_options", {"include_usage": True}),
    ("stream_options", {"continuous_usage_stats": 1}),
    ("model", 5),
    ("model", None),
    ("cache_salt", 5),
    ("wait_for_adapter", "no"),
    ("cache_salt", "x" * 2000),
    ("model", "x" * 2000),
    ("stop_token_ids", [int("9" * 400)]),
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("name", "value"), BAD_VALUES)
async def test_values_out_of_range_are_refused_by_name(
    api: Api, engine: FakeEngine, path: str, name: str, value: Any
) -> None:
    found = error(await api.http.post(path, json=body(**{name: value})), 400)
    assert found["param"] == name
    assert found["type"] == "invalid_request_error"
    assert not engine.submits


@pytest.mark.parametrize(
    ("path", "name", "value"),
    [
        ("/v1/completions", "logprobs", 65),
        ("/v1/completions", "logprobs", -1),
        ("/v1/completions", "logprobs", True),
        ("/v1/chat/completions", "logprobs", 1),
        ("/v1/chat/completions", "top_logprobs", 2 * 10**9),
        ("/v1/chat/completions", "top_logprobs", 21),
        ("/v1/chat/completions", "top_logprobs", -1),
        ("/v1/chat/completions", "top_logprobs", 2),
    ],
)
async def test_logprobs_out_of_range_are_refused(
    api: Api, path: str, name: str, value: Any
) -> None:
    assert error(await api.http.post(path, json=body(**{name: value})), 400)["param"] == name


UNSUPPORTED: list[tuple[str, Any]] = [
    ("suffix", "end"),
    ("tools", [{"type": "function", "function": {"name": "f"}}]),
    ("tool_choice", "required"),
    ("functions", [{"name": "f"}]),
    ("response_format", {"type": "json_object"}),
    ("response_format", {"type": "json_schema", "json_schema": {"schema": "not a schema"}}),
    ("response_format", "json"),
    ("guided_regex", "("),
    ("guided_json", {"type": "object"}),
    ("structured_outputs", {"regex": "("}),
    ("bad_words", ["x"]),
    ("prompt_logprobs", 0),
    ("use_beam_search", True),
    ("reasoning_effort", "high"),
    ("modalities", ["text", "audio"]),
    ("length_penalty", 2.0),
    ("truncate_prompt_tokens", 5),
    ("chat_template", "{{ x }}"),
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("name", "value"), UNSUPPORTED)
async def test_unsupported_fields_are_refused_by_name(
    api: Api, path: str, name: str, value: Any
) -> None:
    found = error(await api.http.post(path, json=body(**{name: value})), 400)
    assert (found["param"], found["code"]) == (name, "unsupported")


async def test_unsupported_fields_that_ask_for_nothing_are_accepted(api: Api) -> None:
    neutral = {
        "suffix": "", "tools": [], "tool_choice": "none", "response_format": {"type": "text"},
        "use_beam_search": False, "length_penalty": 1.0, "modalities": ["text"],
        "spaces_between_special_tokens": True, "guided_json": None, "metadata": {"a": 1},
    }  # fmt: skip
    for path in PATHS:
        response = await api.http.post(path, json=body(max_tokens=1, **neutral))
        assert response.status_code == 200, response.text


async def test_echo_with_logprobs_is_refused(api: Api) -> None:
    found = error(await api.complete(prompt="a", echo=True, logprobs=1), 400)
    assert found["param"] == "echo"


async def test_echo_in_chat_is_refused(api: Api) -> None:
    assert error(await api.chat(echo=True), 400)["param"] == "echo"


BAD_BODIES = [
    b"",
    b"{",
    b"[]",
    b"null",
    b'"text"',
    b"\xff\xfe",
    b'{"model": "base", "prompt": "\xff\xfe"}',
    b'{"model": "base", "prompt": "\\ud83d"}',
    b'{"model": "base", "prompt": "\\ud83d and more"}',
    b'{"model": "base", "messages": [{"role": "user", "content": "\\ude00"}]}',
    b'{"model": "base", "prompt": "a", "temperature": NaN}',
    b'{"model": "base", "prompt": "a", "temperature": Infinity}',
    b'{"model": "base", "prompt": "a", "top_p": NaN}',
    b'{"model": "base", "prompt": "a", "temperature": 1e999}',
    b'{"model": "base", "prompt": "a", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"model": "base", "prompt": ' + b"[" * 100_000,
    b'{"prompt": "a", "messages": []}',
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("content", BAD_BODIES, ids=range(len(BAD_BODIES)))
async def test_malformed_bodies_are_refused(
    api: Api, engine: FakeEngine, path: str, content: bytes
) -> None:
    error(await api.http.post(path, content=content, headers=JSON), 400)
    assert not engine.submits


async def test_unknown_model_is_a_404(api: Api) -> None:
    for response in (
        await api.chat(model="nope"),
        await api.complete(model="nope", prompt="a"),
        await api.complete(model="nope", prompt="a", stream=True),
        await api.http.get("/v1/models/nope"),
    ):
        found = error(response, 404)
        assert (found["code"], found["param"]) == ("model_not_found", "model")


async def test_more_outputs_than_may_be_open_are_refused_before_they_are_made(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(job: Job) -> None:
        raise AssertionError(f"{job.n} outputs of each prompt are made")

    monkeypatch.setattr(Job, "submits", made)
    found = error(await api.complete(prompt=[[5]] * 1024, n=128), 400)
    assert found["param"] == "n" and "at most 4096" in found["message"]


async def test_a_prompt_of_many_outputs_counts_for_each(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_client, "MAX_GROUP_TOKENS", 1000)
    found = error(await api.complete(prompt=[[5] * 300, [6] * 34], n=3), 400)
    assert found["param"] == "n" and "6 outputs have 1002 tokens: at most 1000" in found["message"]
    assert (await api.complete(prompt=[[5] * 300, [6] * 33], n=3)).status_code == 200


async def test_what_cannot_fit_is_refused_before_it_is_tokenised(
    api: Api, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = CONTEXT * tokenizer.longest
    user = {"role": "user", "content": "a" * (most // 2 + 1)}
    assert "the prompt has" in error(await api.complete(prompt="a" * most), 400)["message"]

    def encode(*arguments: Any, **options: Any) -> list[int]:
        raise AssertionError("it is tokenised")

    monkeypatch.setattr(Tokenizer, "encode", encode)
    for answer, name, text in (
        (await api.complete(prompt="a" * (most + 1)), "prompt", f"{most + 1} characters"),
        (await api.chat(messages=[user, user]), "messages", f"{most + 2} characters"),
        (await api.chat(messages=[user | {"content": ""}] * (CONTEXT + 1)), "messages", "513 mess"),
    ):
        found = error(answer, 400)
        assert (found["param"], found["code"]) == (name, "context_length_exceeded")
        assert text in found["message"] and str(CONTEXT) in found["message"]


async def test_full_queue_is_a_503_worth_a_retry(api: Api) -> None:
    for stream in (False, True):
        response = await api.complete(prompt=[0], stream=stream)
        assert error(response, 503)["code"] == "overloaded"
        assert response.headers["retry-after"] == "1"


@pytest.mark.parametrize(
    ("code", "status", "shown"),
    [
        ("model_not_found", 404, "model_not_found"),
        ("invalid_request", 400, None),
        ("context_length_exceeded", 400, "context_length_exceeded"),
        ("overloaded", 503, "overloaded"),
        ("shutting_down", 503, "shutting_down"),
        ("adapter_loading", 503, "adapter_loading"),
        ("adapter_unavailable", 503, "adapter_unavailable"),
        ("engine_dead", 503, "engine_dead"),
        ("numerical_error", 500, "numerical_error"),
    ],
)
async def test_reports_of_the_engine_have_their_status(
    code: str, status: int, shown: str | None
) -> None:
    found = failure(code, "why", None)
    assert (found.status, found.code, found.message) == (status, shown, "why")


async def test_one_refused_output_aborts_its_siblings(api: Api, engine: FakeEngine) -> None:
    engine.delay = 0.01
    error(await api.complete(prompt=[[5], [0]], max_tokens=400), 503)
    await engine.settled(aborts=1)
    assert engine.aborts[0].request_id == engine.submits[0].request_id


async def test_routing_errors_are_json(api: Api) -> None:
    assert error(await api.http.post("/v1/nope", json={}), 404)["code"] == "not_found"
    assert error(await api.http.get("/v1/models/"), 404)["message"]
    for path in PATHS:
        response = await api.http.get(path)
        assert error(response, 405)["code"] == "method_not_allowed"
        assert response.headers["allow"] == "POST"


async def test_internal_errors_are_json_and_tell_nothing(app: FastAPI, api: Api) -> None:
    async def broken() -> None:
        raise RuntimeError("a secret")

    app.add_api_route("/broken", broken)
    found = error(await api.http.get("/broken"), 500)
    assert "secret" not in json.dumps(found)
    assert found["type"] == "server_error"


async def test_a_refusal_leaves_neighbours_alone(api: Api, engine: FakeEngine) -> None:
    error(await api.complete(prompt=[10**9]), 400)
    assert (await api.complete(prompt="a", max_tokens=3)).json()["choices"][0]["text"] == "aaa"
