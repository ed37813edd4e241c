"""HTTP as little as a soak needs it: one request a connection, whole or streamed."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

PATIENCE = 120.0
"""Seconds for any answer; a longer one is a fault."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A server and what to show it."""

    host: str
    port: int
    key: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """A whole answer."""

    status: int
    body: Any

    @property
    def code(self) -> str | None:
        """Of the error."""
        found: str | None = self.body["error"]["code"]
        return found


class Response:
    """An answer under way; read `lines` or `json`."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self.status = 0

    async def begin(self) -> None:
        """Read to the end of the head."""
        head = await self._reader.readuntil(b"\r\n\r\n")
        self.status = int(head.split(b" ", 2)[1])
        self._chunked = b"transfer-encoding: chunked" in head.lower()

    async def body(self) -> bytes:
        """All of it."""
        return b"".join([part async for part in self._parts()])

    async def json(self) -> Any:
        """The body, read."""
        return json.loads(await self.body())

    async def events(self) -> AsyncIterator[Any]:
        """The events of a stream; the last one of a whole stream is ``[DONE]``."""
        rest = b""
        async for part in self._parts():
            *whole, rest = (rest + part).split(b"\n\n")
            for event in whole:
                data = event.removeprefix(b"data: ")
                yield "[DONE]" if data == b"[DONE]" else json.loads(data)

    async def _parts(self) -> AsyncIterator[bytes]:
        if not self._chunked:
            yield await self._reader.read()
            return
        while size := int(await self._reader.readline(), 16):
            yield await self._reader.readexactly(size)
            await self._reader.readexactly(2)


@asynccontextmanager
async def opened(
    target: Target,
    method: str,
    path: str,
    body: Any = None,
    files: Mapping[str, bytes] | None = None,
) -> AsyncIterator[Response]:
    """Send a request; leaving before its answer has been read is what a lost client does.

    Args:
        body: becomes JSON.
        files: in place of a body, a form's by name.
    """
    kind, data = "application/json", b"" if body is None else json.dumps(body).encode()
    if files is not None:
        kind, data = _form(files)
    head = (
        f"{method} {path} HTTP/1.1\r\nhost: {target.host}\r\nauthorization: Bearer {target.key}\r\n"
        f"content-type: {kind}\r\nconnection: close\r\n"
        f"content-length: {len(data)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection(target.host, target.port)
    try:
        writer.write(head.encode() + data)
        await writer.drain()
        yield Response(reader)
    finally:
        writer.transport.abort()


async def ask(
    target: Target,
    method: str,
    path: str,
    body: Any = None,
    files: Mapping[str, bytes] | None = None,
) -> Answer:
    """Send a request and read its whole answer."""
    async with asyncio.timeout(PATIENCE), opened(target, method, path, body, files) as response:
        await response.begin()
        return Answer(status=response.status, body=await response.json())


def _form(files: Mapping[str, bytes]) -> tuple[str, bytes]:
    """Content type and body of ``multipart/form-data``."""
    mark = uuid.uuid4().hex
    data = b""
    for name, content in files.items():
        head = f'content-disposition: form-data; name="{name}"; filename="{name}"'
        data += f"--{mark}\r\n{head}\r\n\r\n".encode() + content + b"\r\n"
    return f"multipart/form-data; boundary={mark}", data + f"--{mark}--\r\n".encode()
