"""A front end in this process over a fake engine."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI

from server import EngineClient, ServerConfig, create_app
from server.auth import ApiKeys
from tests.server.fake_engine import FakeEngine
from tests.text.tiny_tokenizers import byte_level
from tp_engine.text import Tokenizer

MAX_ADAPTER_BYTES = 400_000


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_level(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def tokenizer(model_directory: Path) -> Tokenizer:
    return Tokenizer.load(model_directory)


@pytest.fixture
def socket_directory() -> Iterator[Path]:
    """A short path: those of Unix sockets are limited to about a hundred characters."""
    with tempfile.TemporaryDirectory(prefix="tpe-") as name:
        yield Path(name)


@pytest.fixture
async def engine(socket_directory: Path) -> AsyncIterator[FakeEngine]:
    async with FakeEngine(socket_directory) as engine:
        yield engine


@pytest.fixture
async def client(engine: FakeEngine) -> AsyncIterator[EngineClient]:
    """A client of an engine that has announced itself."""
    async with EngineClient(engine.to_engine, engine.to_front_end) as client:
        await engine.announce()
        async with asyncio.timeout(5):
            await client.wait_for(lambda: client.ready is not None)
        yield client


@pytest.fixture
def app(client: EngineClient, tokenizer: Tokenizer) -> FastAPI:
    return create_app(client, tokenizer, ServerConfig(max_body_bytes=2**20))


@dataclass
class Api:
    """The application under test, called in process."""

    http: httpx.AsyncClient

    async def post(self, path: str, **fields: Any) -> httpx.Response:
        return await self.http.post(path, json={"model": "base"} | fields)

    async def complete(self, **fields: Any) -> httpx.Response:
        return await self.post("/v1/completions", **fields)

    async def chat(self, **fields: Any) -> httpx.Response:
        messages = [{"role": "user", "content": "hi"}]
        return await self.post("/v1/chat/completions", **{"messages": messages} | fields)


def in_process(app: FastAPI) -> httpx.AsyncClient:
    """A client that calls ``app`` without a socket."""
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://test")


@pytest.fixture
async def api(app: FastAPI) -> AsyncIterator[Api]:
    async with in_process(app) as http:
        yield Api(http)


@contextlib.asynccontextmanager
async def serving(app: FastAPI) -> AsyncIterator[int]:
    """Serve ``app`` on a free loopback port, which is yielded."""
    config = uvicorn.Config(
        app, lifespan="off", log_config=None, http="h11", ws="none", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        # Small, so that a client that does not read stalls its stream soon.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**14)
        task = asyncio.create_task(server._serve([listener]))
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            await task


@pytest.fixture
async def port(app: FastAPI) -> AsyncIterator[int]:
    async with serving(app) as port:
        yield port


@pytest.fixture
async def operator(
    client: EngineClient, tokenizer: Tokenizer, tmp_path: Path
) -> AsyncIterator[httpx.AsyncClient]:
    """One who may send adapters of up to MAX_ADAPTER_BYTES; their place is ``tmp_path``."""
    config = ServerConfig(
        admin_keys=ApiKeys(["admin"]),
        adapter_store=tmp_path,
        max_body_bytes=1024,
        max_adapter_bytes=MAX_ADAPTER_BYTES,
    )
    async with in_process(create_app(client, tokenizer, config)) as http:
        http.headers["Authorization"] = "Bearer admin"
        yield http
