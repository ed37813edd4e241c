"""What the application needs to know besides the engine and the tokenizer."""

from __future__ import annotations

from dataclasses import dataclass

from server.auth import ApiKeys


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerConfig:
    """Limits and keys of the HTTP API."""

    api_keys: ApiKeys | None = None
    """Keys that clients must present; None serves anybody."""
    admin_keys: ApiKeys | None = None
    """Keys that operators must present; None: there is no control plane."""
    max_body_bytes: int = 16 * 2**20
    """Longer request bodies are refused with 413."""

    def __post_init__(self) -> None:
        if self.max_body_bytes < 1:
            raise ValueError(f"max_body_bytes={self.max_body_bytes} must be at least 1")
