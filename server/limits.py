"""The limits on request bodies."""

from __future__ import annotations

import re
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.errors import BodyTooLarge

FILES: Final = re.compile(r"/admin/adapters/.+/(upload|tensors)")
"""Paths whose bodies are files: they go to the disk as they come."""


class BodyLimitMiddleware:
    """Answers 413 as soon as a body is known to be too long; never holds more than the limit."""

    def __init__(self, app: ASGIApp, max_bytes: int, max_file_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._max_file_bytes = max_file_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        limit = self._max_file_bytes if FILES.fullmatch(scope["path"]) else self._max_bytes
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > limit:
            # The server goes on to discard the body, so the client gets to read the answer.
            await _error(limit).response()(scope, receive, send)
            return
        await self._app(scope, _counted(receive, limit), send)


def _counted(receive: Receive, limit: int) -> Receive:
    seen = 0

    async def counted() -> Message:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        if seen > limit:
            raise _error(limit)
        return message

    return counted


def _error(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"the request body is over the limit of {limit} bytes")
