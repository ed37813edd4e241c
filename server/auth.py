"""API keys.

Every path needs ``Authorization: Bearer KEY`` except `OPEN_PATHS`, which probes and scrapers
read and which tell nothing about requests.
"""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from server.errors import Unauthorized

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics"})


class ApiKeys:
    """A set of keys, kept as SHA-256 digests."""

    def __init__(self, keys: list[str]) -> None:
        if not keys or not all(keys):
            raise ValueError("api keys: at least one is needed, and none may be empty")
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    @classmethod
    def from_file(cls, path: Path) -> ApiKeys:
        """Read one key a line; blank lines and those that begin with ``#`` are skipped.

        Raises:
            ValueError: the file cannot be read or holds no key.
        """
        try:
            lines = [line.strip() for line in path.read_text("utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"api_key_file={str(path)!r} cannot be read: {error}") from error
        keys = [line for line in lines if line and not line.startswith("#")]
        if not keys:
            raise ValueError(f"api_key_file={str(path)!r} holds no key")
        return cls(keys)

    def accepts(self, key: bytes) -> bool:
        """Whether ``key`` is one of them, in time that depends on neither."""
        digest = hashlib.sha256(key).digest()
        return sum(hmac.compare_digest(digest, known) for known in self._digests) > 0


class AuthMiddleware:
    """Answers 401 in place of the application when the key is missing or wrong."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        guarded = scope["type"] == "http" and scope["path"] not in OPEN_PATHS
        if guarded and (error := self._refusal(scope)) is not None:
            await error.response()(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> Unauthorized | None:
        header = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, key = header.partition(b" ")
        if scheme.lower() != b"bearer" or not key.strip():
            return Unauthorized("no API key: send it as 'Authorization: Bearer KEY'")
        if not self._keys.accepts(key.strip()):
            return Unauthorized("incorrect API key")
        return None
