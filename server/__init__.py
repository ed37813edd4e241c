"""The HTTP front end: an OpenAI-compatible API over an engine in another process.

Importing it is cheap: rank 0 needs `server.process` alone. The names below are loaded on first
use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from server.app import create_app
    from server.config import ServerConfig
    from server.engine_client import EngineClient
    from server.errors import ApiError
    from server.process import start_front_end
    from server.settings import FrontEndSettings

__all__ = [
    "ApiError",
    "EngineClient",
    "FrontEndSettings",
    "ServerConfig",
    "create_app",
    "start_front_end",
]

_HOMES = {
    "ApiError": "server.errors",
    "EngineClient": "server.engine_client",
    "FrontEndSettings": "server.settings",
    "ServerConfig": "server.config",
    "create_app": "server.app",
    "start_front_end": "server.process",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
