"""Configuration of the server: the HTTP side, around the engine's own configuration."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

from tp_engine.config import GIB, MIB, Bytes, ConfigError, EngineConfig, check_number, check_types
from tp_engine.sources import AllowedSources, SourceError

_ORIGIN: Final = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/?#\s,]+")

EXPECTED_LORA_RANK = 16
"""Where adapters can come and nobody says of which rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeConfig:
    """Where and how the engine is served.

    Raises:
        ConfigError: a field has a value that is not allowed; the message names all three.
    """

    engine: EngineConfig
    """What is served; its fields are options beside these."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 or :: for every network (use an API key then)."""
    port: int = 8000
    """TCP port to listen on."""
    api_key_file: str | None = None
    """File with the keys that requests must carry, one a line; without it no key is asked for."""
    admin_key_file: str | None = None
    """File with the keys of operators, one a line; without it adapters can't come or go."""
    allowed_origins: tuple[str, ...] = ()
    """Origins of the web pages that may call the API from a browser, such as
    https://chat.example.org; * allows every page; without any, browsers allow none."""
    adapter_root: tuple[str, ...] = ()
    """Directories that operators may load adapters from while the server runs."""
    adapter_source: tuple[str, ...] = ()
    """Prefixes of the addresses that operators may have adapters fetched from, such as
    s3://bucket/adapters, https://host/path or hf://org; needs an adapter store."""
    adapter_max_bytes: Bytes = 4 * GIB
    """Largest adapter that is fetched or uploaded."""
    adapter_store: str | None = None
    """Directory in which loaded adapters are kept, so that they are there after a restart."""
    adapter_drain_timeout: float = 60.0
    """Seconds that running requests of an adapter that is unloaded or replaced may still take."""
    adapter_call_timeout: float = 300.0
    """Seconds after which an operator's call is answered with 504 if it is not done."""
    flush_interval: float = 60.0
    """Seconds after which pushed adapters are written to the store; 0: only when the server stops
    or is asked to."""
    max_body_bytes: Bytes = 8 * MIB
    """Largest request body."""
    max_open_requests: int = 4096
    """Most requests that may be open; more are refused until some have ended."""
    chat_template: str | None = None
    """Jinja file that replaces the model's own chat template."""
    keep_alive: float = 75.0
    """Seconds an idle connection stays open; keep it longer than that of a proxy in front."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe messages to log."""
    log_format: Literal["text", "json"] = "text"
    """Lines for people, or one JSON object a line."""
    access_log: bool = False
    """Log a line for every HTTP request (never its body)."""
    stats_interval: float = 10.0
    """Seconds between the log's throughput lines; 0 turns them off."""

    @property
    def expected_lora_rank(self) -> int:
        """LoRA rank of the adapters that may come while serving."""
        if self.engine.max_lora_rank is not None:
            return self.engine.max_lora_rank
        return EXPECTED_LORA_RANK if self.admin_key_file else 0

    def __post_init__(self) -> None:
        check_types(self)
        check_number(self, "port", 1, 65535)
        check_number(self, "max_body_bytes", 1024, unit="bytes")
        check_number(self, "adapter_max_bytes", 1024, unit="bytes")
        check_number(self, "max_open_requests", 1)
        check_number(self, "keep_alive", 0, low_open=True, unit="seconds")
        check_number(self, "stats_interval", 0, unit="seconds")
        check_number(self, "adapter_drain_timeout", 0, unit="seconds")
        check_number(self, "adapter_call_timeout", 0, low_open=True, unit="seconds")
        check_number(self, "flush_interval", 0, unit="seconds")
        self._check_sources()
        for origin in self.allowed_origins:
            if not _ORIGIN.fullmatch(origin):
                raise ConfigError("allowed_origins", origin, "scheme://host[:port], or *")
        texts = ("host", "api_key_file", "admin_key_file", "adapter_store", "chat_template")
        for name, value in (
            *((name, getattr(self, name)) for name in texts),
            *(("adapter_root", root) for root in self.adapter_root),
        ):
            if value is not None and not value.strip():
                raise ConfigError(name, value, "text that is not blank")

    def _check_sources(self) -> None:
        try:
            AllowedSources(self.adapter_source)
        except SourceError as error:
            raise ConfigError("adapter_source", self.adapter_source, str(error)) from error
