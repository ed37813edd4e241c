"""Server-sent events.

A stream ends with ``data: [DONE]``; after an error event it just ends, so that a client can tell
a whole answer from a broken one.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.connection import while_connected
from server.errors import ApiError
from server.openai.fields import StreamOptions
from server.openai.formats import Format
from server.openai.generation import Generation
from server.openai.shapes import Usage

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"


def event(body: msgspec.Struct) -> bytes:
    """One event."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


async def events(
    generation: Generation, layout: Format, options: StreamOptions
) -> AsyncIterator[bytes]:
    """The events of a whole stream; raises `ApiError` when an output is lost."""
    opened: set[int] = set()
    async for delta in generation.deltas():
        first = delta.index not in opened
        usage = _usage_of_chunk(generation, options)
        chunks = layout.chunks(delta, usage, first=first, revision=generation.revision)
        opened.add(delta.index)
        yield b"".join(event(chunk) for chunk in chunks)
    if options.include_usage:
        yield event(layout.usage_chunk(generation.usage, revision=generation.revision))
    yield DONE


def _usage_of_chunk(generation: Generation, options: StreamOptions) -> Usage | UnsetType | None:
    """As the API documents it: absent unless asked for, then null in all chunks but the last."""
    if not options.include_usage:
        return UNSET
    return generation.usage if options.continuous_usage_stats else None


class EventStream(Response):
    """Sends events until they end or the client leaves, then calls ``close``."""

    media_type = "text/event-stream"

    def __init__(self, first: bytes, rest: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        """``first`` was awaited before the response began, so that errors get their status."""
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(headers=headers)
        del self.headers["content-length"]
        self._first = first
        self._rest = rest
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            # A client that leaves is none of the framework's errors.
            with suppress(ClientDisconnect):
                await while_connected(receive, self._send(send))
        finally:
            self._close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await _send_part(send, self._first)
        try:
            async for part in self._rest:
                await _send_part(send, part)
        except ApiError as error:
            await _send_part(send, event(error.body))
        except Exception:
            logger.exception("a stream broke")
            await _send_part(send, event(ApiError("internal error").body))
        await send({"type": "http.response.body", "body": b""})


async def _send_part(send: Send, part: bytes) -> None:
    await send({"type": "http.response.body", "body": part, "more_body": True})
