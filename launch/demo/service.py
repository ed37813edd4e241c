"""The demo's server: started through torchrun, waited for, and stopped with all it started."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import httpx
import psutil

__all__ = ["Service", "ServiceError", "choose_port", "default_ranks", "serve_command"]

CHECKOUT = Path(__file__).resolve().parents[2]
HOST = "127.0.0.1"
PREFERRED_PORT = 8000
READY_TIMEOUT_S = 900.0
POLL_S = 0.25
# More than the server gives its open requests to end in.
STOP_TIMEOUT_S = 45.0
DEFAULT_CPU_RANKS = 2


class ServiceError(RuntimeError):
    """The server died, never became ready, or left processes behind."""


def serve_command(
    *, model: Path, names: Sequence[str], adapters: Mapping[str, Path], ranks: int, port: int
) -> list[str]:
    """Arguments that serve `model` as `names` with `adapters` (name → folder) on `ranks` ranks."""
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--standalone", f"--nproc-per-node={ranks}"),
        *(str(CHECKOUT / "launch" / "serve.py"), f"--model={model}"),
        *(f"--served-model-name={name}" for name in names),
        *(f"--host={HOST}", f"--port={port}"),
        *(f"--lora={adapter}={folder}" for adapter, folder in adapters.items()),
    ]


class Service:
    """A running server; a context manager that stops it on the way out."""

    def __init__(self, command: Sequence[str], port: int) -> None:
        """Start `command`, which is to listen on `port`; its output goes where ours goes."""
        self.url = f"http://{HOST}:{port}"
        defaults = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        # Its own session: Ctrl-C reaches this process alone, which then stops the server once.
        self._process = subprocess.Popen(
            command, cwd=CHECKOUT, env=defaults | dict(os.environ), start_new_session=True
        )

    def __enter__(self) -> "Service":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Return once `GET /ready` says 200; raise `ServiceError` on death or after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        with httpx.Client(base_url=self.url, timeout=5.0, trust_env=False) as http:
            while not _is_ready(http):
                self.require_alive()
                if time.monotonic() > deadline:
                    raise ServiceError(f"the server was not ready within {timeout_s:.0f} s")
                time.sleep(POLL_S)

    def wait(self) -> None:
        """Block as long as the server runs; raise `ServiceError` when it ends by itself."""
        self._process.wait()
        self.require_alive()

    def require_alive(self) -> None:
        """Raise `ServiceError` when the server has ended."""
        code = self._process.poll()
        if code is not None:
            raise ServiceError(f"the server ended with exit code {code}; its log is above")

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Ask the server to stop and wait for all of its processes; kill and raise on stragglers.

        The signal goes to the ranks: rank 0 drains and takes the others along, and torchrun ends
        as they do. Sent to torchrun itself, it would end in a traceback.
        """
        if self._process.poll() is not None:
            return
        torchrun = psutil.Process(self._process.pid)
        family = [torchrun, *torchrun.children(recursive=True)]
        for process in torchrun.children() or [torchrun]:
            with suppress(psutil.NoSuchProcess):
                process.terminate()
        alive = family
        try:
            alive = _outliving(family, timeout_s)
        finally:  # a second Ctrl-C ends the wait, and leaves nothing behind either
            for process in alive:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        self._process.wait()
        if alive:
            raise ServiceError(f"had to kill {len(alive)} processes that did not stop: {alive}")


def _outliving(family: list[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Wait for all to end; those that still run after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while alive := [process for process in family if _runs(process)]:
        if time.monotonic() > deadline:
            break
        time.sleep(POLL_S)
    return alive


def _runs(process: psutil.Process) -> bool:
    """Whether it still does anything; an orphan may stay a zombie for want of an init process."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _is_ready(http: httpx.Client) -> bool:
    try:
        return http.get("/ready").status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def choose_port(wanted: int | None) -> int:
    """The wanted port; with None 8000, or any free one when that is taken.

    Raises `ServiceError` when the wanted port is taken: whoever answers there would pass for the
    server.
    """
    for port in (PREFERRED_PORT, 0) if wanted is None else (wanted,):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
            number: int = probe.getsockname()[1]
            return number
    raise ServiceError(f"port {wanted or PREFERRED_PORT} of {HOST} can't be used")


def default_ranks() -> int:
    """One rank a GPU, or two on a machine without one."""
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        return DEFAULT_CPU_RANKS
    gpus = sum(line.startswith("GPU ") for line in listing.stdout.splitlines())
    return gpus or DEFAULT_CPU_RANKS
