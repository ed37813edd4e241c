"""What the application needs to know besides the engine and the tokenizer."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from server.auth import ApiKeys
from tp_engine.sources import AllowedSources


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerConfig:
    """Limits and keys of the HTTP API."""

    api_keys: ApiKeys | None = None
    """Keys that clients must present; None serves anybody."""
    admin_keys: ApiKeys | None = None
    """Keys that operators must present; None: there is no control plane."""
    allowed_origins: tuple[str, ...] = ()
    """Origins of the web pages that may call the API from a browser; ``*``: of all pages."""
    max_body_bytes: int = 16 * 2**20
    """Longer request bodies are refused with 413."""
    adapter_store: Path | None = None
    """The engine's store, for what is fetched or uploaded; None: neither is possible."""
    adapter_sources: AllowedSources = field(default_factory=lambda: AllowedSources(()))
    """Where adapters may be fetched from."""
    max_adapter_bytes: int = 4 * 2**30
    """Longest adapter that is fetched or uploaded."""

    def __post_init__(self) -> None:
        for name in ("max_body_bytes", "max_adapter_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
