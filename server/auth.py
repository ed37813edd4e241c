"""API keys, sent as ``Authorization: Bearer KEY``.

OPEN_PATHS      none: probes and scrapers read them; they name adapters, and tell of no request
CONTROL_PATHS   an operator's; without operators there are no such paths
all others      a client's; without clients' keys anybody may call them
"""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from server.errors import Unauthorized

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics"})
CONTROL_PATHS = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/admin"})
"""And all that lies below them."""


class ApiKeys:
    """A set of keys, kept as SHA-256 digests."""

    def __init__(self, keys: list[str]) -> None:
        if not keys or not all(keys):
            raise ValueError("api keys: at least one is needed, and none may be empty")
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    @classmethod
    def from_file(cls, path: Path, option: str = "api_key_file") -> ApiKeys:
        """Read one key a line; blank lines and those that begin with ``#`` are skipped.

        Args:
            option: that names the file, for errors.

        Raises:
            ValueError: the file cannot be read or holds no key.
        """
        try:
            lines = [line.strip() for line in path.read_text("utf-8-sig").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{option}={str(path)!r} cannot be read: {error}") from error
        keys = [line for line in lines if line and not line.startswith("#")]
        if not keys:
            raise ValueError(f"{option}={str(path)!r} holds no key")
        return cls(keys)

    def accepts(self, key: bytes) -> bool:
        """Whether ``key`` is one of them, in time that depends on neither."""
        digest = hashlib.sha256(key).digest()
        return sum(hmac.compare_digest(digest, known) for known in self._digests) > 0


class AuthMiddleware:
    """Answers 401 in place of the application when the key is missing or wrong."""

    def __init__(self, app: ASGIApp, keys: ApiKeys | None, admin_keys: ApiKeys | None) -> None:
        self._app = app
        self._keys = keys
        self._admin_keys = admin_keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        keys = self._keys_for(scope["path"]) if scope["type"] == "http" else None
        if keys is not None and (error := _refusal(scope, keys)) is not None:
            await error.response()(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _keys_for(self, path: str) -> ApiKeys | None:
        if path in OPEN_PATHS:
            return None
        control = any(path == top or path.startswith(f"{top}/") for top in CONTROL_PATHS)
        if control and self._admin_keys is not None:
            return self._admin_keys
        return self._keys


def _refusal(scope: Scope, keys: ApiKeys) -> Unauthorized | None:
    header = dict(scope["headers"]).get(b"authorization", b"")
    scheme, _, key = header.partition(b" ")
    if scheme.lower() != b"bearer" or not key.strip():
        return Unauthorized("no API key: send it as 'Authorization: Bearer KEY'")
    if not keys.accepts(key.strip()):
        return Unauthorized("incorrect API key")
    return None
