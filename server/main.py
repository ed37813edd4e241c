"""The front-end process: ``python -m server.main`` with settings as JSON on standard input.

start: listen ─> read keys ─> load tokenizer ─> serve (503 until the engine is ready)
end:   Draining and nothing open ─> Goodbye ─> answers read ─> exit 0
       engine or parent lost ─> open streams get an error ─> exit 1
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import socket
import sys
import threading
from collections.abc import Generator
from pathlib import Path

import uvicorn

from server.app import create_app
from server.auth import ApiKeys
from server.config import ServerConfig
from server.engine_client import EngineClient
from server.parent import ask_for_death_signal, ignore_stop_signals, parent_gone
from server.settings import FrontEndSettings
from tp_engine.interpreter import freeze_objects
from tp_engine.sources import AllowedSources
from tp_engine.text import Tokenizer

logger = logging.getLogger(__name__)

_FILES = 2**16
"""Files that may be open, connections included, where the system lets us choose."""
_LOST_TIMEOUT_S = 1
"""How long broken streams may take to reach their clients."""


def run_front_end(settings: FrontEndSettings) -> int:
    """Serve until the engine has drained or is lost; return the exit code.

    Raises:
        ValueError: a setting does not work: the port is taken, a file is missing or wrong.
    """
    ignore_stop_signals()
    ask_for_death_signal()
    _raise_file_limit()
    with _listen(settings.host, settings.port) as listener:
        logger.info("listening on %s port %d", *listener.getsockname()[:2])
        config = ServerConfig(
            api_keys=_keys(settings.api_key_file, "api_key_file"),
            admin_keys=_keys(settings.admin_key_file, "admin_key_file"),
            allowed_origins=settings.allowed_origins,
            max_body_bytes=settings.max_body_bytes,
            adapter_store=None if settings.adapter_store is None else Path(settings.adapter_store),
            adapter_sources=AllowedSources(settings.adapter_sources),
            max_adapter_bytes=settings.max_adapter_bytes,
        )
        template = _chat_template(settings)
        _hide_torch()
        tokenizer = Tokenizer.load(Path(settings.model_directory), chat_template=template)
        return asyncio.run(_serve(settings, config, tokenizer, listener))


async def _serve(
    settings: FrontEndSettings, config: ServerConfig, tokenizer: Tokenizer, listener: socket.socket
) -> int:
    client = EngineClient(
        settings.to_engine,
        settings.to_front_end,
        max_open=settings.max_open_requests,
        call_timeout=settings.call_timeout_s,
    )
    async with client:
        app = create_app(client, tokenizer, config)
        server = _Server(_uvicorn_config(app, settings))
        freeze_objects()
        watches = [
            asyncio.create_task(_watch_parent(client, settings.parent_pid)),
            asyncio.create_task(_end_when_over(client, server)),
        ]
        await server.serve(sockets=[listener])
        await app.state.services.loads.operations.close()
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*watches, return_exceptions=True)
        client.goodbye()
    if client.dead is None:
        return 0
    _remove_sockets(settings)
    return 1


def _remove_sockets(settings: FrontEndSettings) -> None:
    """Remove the sockets' files in place of an engine that ended without doing so."""
    for endpoint in (settings.to_engine, settings.to_front_end):
        path = Path(endpoint.removeprefix("ipc://"))
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # not there any more, or not ours alone
        path.parent.rmdir()


async def _watch_parent(client: EngineClient, parent_pid: int) -> None:
    await parent_gone(parent_pid)
    client.engine_died("the engine process has ended")


async def _end_when_over(client: EngineClient, server: uvicorn.Server) -> None:
    await client.wait_for(
        lambda: client.dead is not None or (client.draining and client.open_requests == 0)
    )
    if client.dead is not None:
        server.config.timeout_graceful_shutdown = _LOST_TIMEOUT_S
        _exit_after(_LOST_TIMEOUT_S + 2)
    server.should_exit = True


def _exit_after(seconds: float) -> None:
    """End the process then, even if a worker thread or a destructor hangs."""
    timer = threading.Timer(seconds, os._exit, (1,))
    timer.daemon = True
    timer.start()


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave signals alone: rank 0 decides when to stop."""
        yield


def _uvicorn_config(app: object, settings: FrontEndSettings) -> uvicorn.Config:
    return uvicorn.Config(
        app,  # type: ignore[arg-type]
        loop="asyncio",
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=settings.access_log,
        server_header=False,
        timeout_keep_alive=settings.keep_alive_s,
        timeout_graceful_shutdown=settings.close_timeout_s,
    )


def _raise_file_limit() -> None:
    """A shell's limit is often 1024: too few connections for the requests that may be open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # macOS has a lower one besides
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise ValueError(f"cannot listen on host={host!r} port={port}: {error}") from error
    # Connections inherit it; asyncio sets it only where the listener names its protocol. With
    # Nagle's algorithm a small write waits up to 40 ms for the client's word on the one before.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _keys(file: str | None, option: str) -> ApiKeys | None:
    return None if file is None else ApiKeys.from_file(Path(file), option)


def _chat_template(settings: FrontEndSettings) -> str | None:
    if settings.chat_template_file is None:
        return None
    try:
        return Path(settings.chat_template_file).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"chat_template={settings.chat_template_file!r} cannot be read: {error}"
        ) from error


def _hide_torch() -> None:
    """Keep transformers from importing torch: that takes seconds, for nothing here."""
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
    sys.modules["torch"] = None  # type: ignore[assignment]


def main() -> int:
    """Entry point of the process."""
    logging.basicConfig(level=logging.INFO, format="[http] %(message)s", stream=sys.stderr)
    # Libraries log addresses with what they were signed with, and where keys were found.
    for name in ("uvicorn.error", "httpx", "botocore", "aiobotocore"):
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        return run_front_end(FrontEndSettings.from_json(sys.stdin.buffer.read()))
    except ValueError as error:
        logger.error("%s", error)
        return 1


if __name__ == "__main__":
    sys.exit(main())
