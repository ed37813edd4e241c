"""What rank 0 tells the front-end process, as JSON."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec


@dataclass(frozen=True, kw_only=True, slots=True)
class FrontEndSettings:
    """Settings of one front-end process."""

    to_engine: str
    """ZeroMQ endpoint on which the engine receives; bound by it."""
    to_front_end: str
    """ZeroMQ endpoint on which the engine sends; bound by it."""
    parent_pid: int
    """Process id of rank 0; when it is no longer the parent, the front end ends."""
    model_directory: str
    """Local directory with the tokenizer files."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8000
    """Port to listen on; 0 picks a free one, which the log names."""
    chat_template_file: str | None = None
    """Jinja file that replaces the model's own chat template."""
    api_key_file: str | None = None
    """File of API keys; None serves anybody."""
    admin_key_file: str | None = None
    """File of operators' keys; None: there is no control plane."""
    allowed_origins: tuple[str, ...] = ()
    """Origins of the web pages that may call the API from a browser; ``*``: of all pages."""
    max_body_bytes: int = 16 * 2**20
    """Longest request body."""
    adapter_store: str | None = None
    """Directory of the engine's store; None: adapters can be neither fetched nor uploaded."""
    adapter_sources: tuple[str, ...] = ()
    """Prefixes of the addresses that adapters may be fetched from."""
    max_adapter_bytes: int = 4 * 2**30
    """Longest adapter that is fetched or uploaded."""
    max_open_requests: int = 4096
    """Most engine requests open at a time; more are refused with 503."""
    call_timeout_s: float = 300.0
    """How long the engine may take over an operator's call; then 504 answers it."""
    keep_alive_s: int = 75
    """How long an idle connection stays open: longer than a proxy's own limit, commonly 60."""
    close_timeout_s: int = 5
    """After draining, how long clients may take to read the rest of their answers."""
    access_log: bool = False
    """Whether to log a line a response: address, method, path with query, status."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port={self.port} is not allowed: from 0 to 65535")
        for name in ("max_body_bytes", "max_open_requests", "max_adapter_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} is not allowed: at least 1")
        for name in ("keep_alive_s", "close_timeout_s", "call_timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} is not allowed: above 0")

    def to_json(self) -> bytes:
        """These settings as JSON."""
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, data: bytes) -> FrontEndSettings:
        """Inverse of `to_json`. Raises ``msgspec.ValidationError`` on anything else."""
        return msgspec.json.decode(data, type=cls)
