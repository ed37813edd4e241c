"""Over real sockets: clients that leave, stall or send too much; the OpenAI client."""

from __future__ import annotations

import asyncio
import json
import threading
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field

import httpx
import openai
import pytest

from server import EngineClient
from server.openai import prompts
from tests.server.fake_engine import CONTEXT, MODELS, VOCAB, FakeEngine
from tp_engine.messages import Models
from tp_engine.text import Tokenizer

pytestmark = pytest.mark.anyio
LONG = 1000
"""Characters that the context does not hold, though it holds as many tokens as they might be."""


def request(path: str = "/v1/completions", **fields: object) -> bytes:
    body = json.dumps({"model": "base", "prompt": "ab", "max_tokens": 500} | fields).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def connect(port: int, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    await writer.drain()
    return reader, writer


async def submitted(engine: FakeEngine, count: int = 1) -> None:
    async with asyncio.timeout(2):
        while len(engine.submits) < count:
            await asyncio.sleep(0.005)


async def leave(writer: asyncio.StreamWriter) -> None:
    writer.close()
    await writer.wait_closed()


async def test_leaving_a_stream_aborts_it(
    engine: FakeEngine, client: EngineClient, port: int
) -> None:
    engine.delay = 0.01
    reader, writer = await connect(port, request(stream=True, n=2))
    await reader.readuntil(b"data: ")
    await leave(writer)
    await engine.settled(aborts=2)
    assert not any(abort.finished for abort in engine.aborts)
    assert client.open_requests == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_while_queued_aborts(
    engine: FakeEngine, client: EngineClient, port: int, stream: bool
) -> None:
    engine.gate.clear()
    _, writer = await connect(port, request(stream=stream))
    await submitted(engine)
    await leave(writer)
    await engine.settled(aborts=1)
    assert client.open_requests == 0


async def test_leaving_before_a_whole_answer_aborts(
    engine: FakeEngine, client: EngineClient, port: int
) -> None:
    engine.delay = 0.01
    _, writer = await connect(port, request())
    await submitted(engine)
    await asyncio.sleep(0.05)
    await leave(writer)
    await engine.settled(aborts=1)
    assert client.open_requests == 0


async def test_leaving_in_the_middle_of_a_body_starts_nothing(
    engine: FakeEngine, port: int
) -> None:
    _, writer = await connect(port, request()[:-5])
    await asyncio.sleep(0.05)
    await leave(writer)
    await asyncio.sleep(0.05)
    assert engine.submits == []


@pytest.mark.parametrize("stream", [False, True])
async def test_a_body_is_not_kept_until_its_answer_is_whole(
    engine: FakeEngine, port: int, stream: bool
) -> None:
    engine.gate.clear()
    body = request(stream=stream, ignored="x" * 900_000)
    tracemalloc.start()
    try:
        opened = [await connect(port, body) for _ in range(8)]
        await submitted(engine, 8)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 4 * len(body)
    for _, writer in opened:
        await leave(writer)


async def test_a_reader_that_stalls_holds_up_nobody(
    engine: FakeEngine, client: EngineClient, port: int
) -> None:
    # Long log-probability reports fill the socket's buffers before the stream is over.
    fields = {"stream": True, "n": 10, "logprobs": 64, "max_tokens": 200}
    reader, writer = await connect(port, request(**fields))
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as http:
        await submitted(engine, 10)
        body = {"model": "base", "prompt": "ab", "max_tokens": 3}
        assert (await http.post("/v1/completions", json=body)).status_code == 200
        async with asyncio.timeout(20):
            while engine.running:
                await asyncio.sleep(0.01)
    stream = b""
    while b"[DONE]" not in stream[-64:]:
        stream += await reader.read(2**20)
    assert stream.count(b'"finish_reason":"length"') == 10
    assert stream.count(b"data: ") < 1000, "what was not read should have been merged"
    await leave(writer)


async def test_a_lost_engine_ends_open_streams_with_an_error(
    engine: FakeEngine, client: EngineClient, port: int
) -> None:
    engine.delay = 0.01
    reader, writer = await connect(port, request(stream=True))
    _, waiting = await connect(port, request())
    await reader.readuntil(b"data: ")
    await submitted(engine, 2)
    client.engine_died("rank 1 is gone")
    async with asyncio.timeout(2):
        rest = await reader.readuntil(b"0\r\n\r\n")
    assert b'data: {"error":{"message":"rank 1 is gone"' in rest
    assert b"[DONE]" not in rest
    await leave(writer)
    await leave(waiting)


@pytest.mark.parametrize("headers", [{"content-length": str(64 * 2**20)}, {}])
async def test_health_answers_while_long_bodies_are_refused(
    port: int, headers: dict[str, str]
) -> None:
    async def content() -> AsyncIterator[bytes]:
        for _ in range(64):
            yield b"x" * 2**20

    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as http:
        upload = asyncio.create_task(
            http.post("/v1/completions", content=content(), headers=headers)
        )
        for _ in range(10):
            async with asyncio.timeout(1):
                assert (await http.get("/health")).status_code == 200
        answer = await upload
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")


async def test_health_answers_while_long_text_is_tokenised(
    port: int, engine: FakeEngine, client: EngineClient
) -> None:
    await engine.send(Models(models=MODELS, max_model_len=100_000))
    await client.wait_for(lambda: client.ready is not None and client.ready.max_model_len > CONTEXT)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as http:
        body = {"model": "base", "prompt": "the word " * 100_000}
        upload = asyncio.create_task(http.post("/v1/completions", json=body))
        while not upload.done():
            async with asyncio.timeout(1):
                assert (await http.get("/health")).status_code == 200
        found = (await upload).json()["error"]
        assert found["code"] == "context_length_exceeded" and "the prompt has" in found["message"]


@dataclass
class SlowTokenizer:
    """Long texts take until they are let go."""

    begun: list[int] = field(default_factory=list)
    go: threading.Event = field(default_factory=threading.Event)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowTokenizer]:
    slow = SlowTokenizer()
    encode = Tokenizer.encode

    def wait_and_encode(tokenizer: Tokenizer, text: str, **options: bool) -> list[int]:
        if len(text) > LONG:
            slow.begun.append(len(text))
            assert slow.go.wait(20)
        return encode(tokenizer, text, **options)

    monkeypatch.setattr(prompts, "LONG_TEXT", LONG)
    monkeypatch.setattr(Tokenizer, "encode", wait_and_encode)
    yield slow
    slow.go.set()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_many_long_texts_hold_up_no_short_one(
    port: int, slow: SlowTokenizer, path: str
) -> None:
    def body(text: str) -> dict[str, object]:
        messages = [{"role": "user", "content": text}]
        return {"model": "base", "prompt": text, "messages": messages, "max_tokens": 1}

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{port}", timeout=20, limits=limits
    ) as http:
        long = [
            asyncio.create_task(http.post(path, json=body("a" * (LONG + 1)))) for _ in range(40)
        ]
        async with asyncio.timeout(10):
            while not slow.begun:
                await asyncio.sleep(0.01)
            assert (await http.post(path, json=body("a"))).status_code == 200
        slow.go.set()
        codes = {answer.json()["error"]["code"] for answer in await asyncio.gather(*long)}
    assert codes == {"context_length_exceeded"}


async def test_a_text_whose_client_has_left_is_not_tokenised(
    port: int, slow: SlowTokenizer
) -> None:
    data = request(prompt="a" * (LONG + 1))
    stayed = [await connect(port, data) for _ in range(2)]
    async with asyncio.timeout(5):
        while len(slow.begun) < 2:
            await asyncio.sleep(0.01)
    _, writer = await connect(port, data)
    await asyncio.sleep(0.2)
    await leave(writer)
    await asyncio.sleep(0.2)
    slow.go.set()
    for reader, writer in stayed:
        assert b"400" in await reader.readline()
        await leave(writer)
    await asyncio.sleep(0.2)
    assert len(slow.begun) == 2


async def test_malformed_http_does_not_end_the_server(port: int) -> None:
    reader, writer = await connect(port, b"\x00\xff nonsense\r\n\r\n")
    assert b"400" in await reader.read(64)
    await leave(writer)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
        assert (await http.get("/health")).status_code == 200


@pytest.fixture
async def sdk(port: int) -> AsyncIterator[openai.AsyncOpenAI]:
    base_url = f"http://127.0.0.1:{port}/v1"
    async with openai.AsyncOpenAI(base_url=base_url, api_key="unused", max_retries=0) as sdk:
        yield sdk


async def test_openai_client_lists_models(sdk: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in sdk.models.list()] == ["base", "team/sql-lora"]
    assert (await sdk.models.retrieve("team/sql-lora")).id == "team/sql-lora"


async def test_openai_client_completes(
    sdk: openai.AsyncOpenAI, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    engine.reply = lambda submit: tokenizer.encode("caf\u00e9 \U0001f600!")
    whole = await sdk.completions.create(model="base", prompt="a", max_tokens=40, logprobs=1)
    assert whole.choices[0].text == "caf\u00e9 \U0001f600!"
    assert whole.choices[0].logprobs is not None and whole.usage is not None
    stream = await sdk.completions.create(
        model="base", prompt="a", max_tokens=40, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].text for c in chunks[:-1]) == whole.choices[0].text
    assert chunks[-1].usage == whole.usage


async def test_openai_client_chats(
    sdk: openai.AsyncOpenAI, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    engine.reply = lambda submit: tokenizer.encode("caf\u00e9 \U0001f600!")
    turns = [{"role": "user", "content": "hi"}]
    whole = await sdk.chat.completions.create(
        model="team/sql-lora", messages=turns, logprobs=True, top_logprobs=2
    )
    choice = whole.choices[0]
    assert choice.message.content == "caf\u00e9 \U0001f600!"
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert len(choice.logprobs.content[0].top_logprobs) == 2
    stream = await sdk.chat.completions.create(model="team/sql-lora", messages=turns, stream=True)
    deltas = [chunk.choices[0].delta async for chunk in stream]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == choice.message.content


async def test_openai_client_raises_its_own_errors(sdk: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        await sdk.completions.create(model="nope", prompt="a")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        await sdk.completions.create(model="base", prompt=[VOCAB])
    assert bad.value.param == "prompt"


async def test_openai_client_sees_a_broken_stream(
    sdk: openai.AsyncOpenAI, engine: FakeEngine, client: EngineClient
) -> None:
    engine.delay = 0.01
    stream = await sdk.completions.create(model="base", prompt="a", max_tokens=400, stream=True)
    with pytest.raises(openai.APIError, match="rank 1"):
        async for _ in stream:
            client.engine_died("rank 1 is gone")
