"""A real service under test: its processes, its log and its clients, every wait bounded.

Every process of a service inherits a mark in its environment, so that the ones whose parents have
ended are found too.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.helpers.ports import free_port

ROOT = Path(__file__).parents[2]
HOST = "127.0.0.1"
SCRIPT = "launch/serve.py"
MARK = "E2E_SERVICE"
START_SECONDS = 120.0
"""For a start on a busy machine; idle, it takes six."""
Role = int | str
"""A rank by its number, ``front end`` or ``torchrun``."""


def wait_until(condition: Callable[[], Any], timeout: float, what: str) -> None:
    """Poll until ``condition`` holds; fails the test when it does not within ``timeout``."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout:g} s: {what}"
        time.sleep(0.05)


class Server:
    """One start of ``launch/serve.py``.

    Use as a context manager: whatever is left at the end is killed.
    """

    def __init__(
        self,
        directory: Path,
        model: Path,
        *options: str,
        ranks: int | None = 2,
        port: int = 0,
        key: str | None = None,
        script: str = SCRIPT,
        environment: dict[str, str] | None = None,
    ) -> None:
        """Start it.

        Args:
            directory: for its log.
            options: of serve.py, besides the model and the port.
            ranks: under torchrun; None for one process without it.
            port: to listen on; 0 for a free one.
            key: API key that the clients made here send.
            script: started in place of serve.py.
            environment: variables besides this process's own.
        """
        self.port = port or free_port()
        self.headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self.url = f"http://{HOST}:{self.port}"
        self._mark = uuid.uuid4().hex
        self._scratch = Path(tempfile.mkdtemp(prefix="e2e-"))
        self._log = directory / f"{self._mark}.log"
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    *(torchrun if ranks is not None else []),
                    script,
                    f"--model={model}",
                    f"--port={self.port}",
                    *options,
                ],
                cwd=ROOT,
                env=os.environ
                | {MARK: self._mark, "TMPDIR": str(self._scratch)}
                | (environment or {}),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.http = httpx.Client(base_url=self.url, headers=self.headers, timeout=60.0)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exception: object) -> None:
        self.http.close()
        while left := self.processes():
            for process in left.values():
                process.kill()
            time.sleep(0.05)
        self.process.wait(10)
        shutil.rmtree(self._scratch)
        if exception[0] is not None:
            print(f"--- log of the service\n{self.log}")

    # --- what it is ---------------------------------------------------------------------------

    @property
    def log(self) -> str:
        """All that its processes wrote so far."""
        return self._log.read_text("utf-8", "replace")

    def processes(self) -> dict[Role, psutil.Process]:
        """Its live processes by role; unknown ones by their command lines."""
        found: dict[Role, psutil.Process] = {}
        for process in psutil.process_iter():
            try:
                environment = process.environ()
                if environment.get(MARK) == self._mark and process.status() != "zombie":
                    found[_role(process.cmdline(), environment, process.pid)] = process
            except psutil.Error:
                continue
        return found

    def leftovers(self) -> list[str]:
        """Files in its directory for temporary ones, torchrun's own aside."""
        mine = self._scratch.glob("tp-engine-*")
        return sorted(path.name for path in mine)

    def gauge(self, name: str) -> float:
        """A value of ``/metrics`` by its full name."""
        for line in self.http.get("/metrics").text.splitlines():
            if line.startswith(f"{name} "):
                return float(line.split()[1])
        raise AssertionError(f"no {name} in /metrics")

    @property
    def open_requests(self) -> float:
        """Requests in the engine, by its latest word on it."""
        running = self.gauge("vllm:num_requests_running")
        return running + self.gauge("vllm:num_requests_waiting")

    # --- what is done to it --------------------------------------------------------------------

    def wait_ready(self) -> Server:
        """Return once ``/ready`` says so; fails when the service ends first."""
        wait_until(self._ready_or_ended, START_SECONDS, "/ready")
        assert self.process.poll() is None, f"ended with {self.process.returncode}\n{self.log}"
        return self

    def _ready_or_ended(self) -> bool:
        return self.process.poll() is not None or self.status("/ready") == 200

    def status(self, path: str) -> int | None:
        """Status of a GET; None while nobody answers."""
        try:
            return self.http.get(path, timeout=5.0).status_code
        except httpx.TransportError:
            return None

    def signal(self, role: Role, number: signal.Signals) -> None:
        """Send a signal to one of its processes."""
        self.processes()[role].send_signal(number)

    def wait_ended(self, timeout: float) -> int:
        """Wait for the exit code of what was started, and for every process to be gone."""
        start = time.monotonic()
        code = self.process.wait(timeout)
        left = timeout - (time.monotonic() - start)
        wait_until(lambda: not self.processes(), max(left, 1.0), f"{self.processes()} to end")
        return code

    # --- requests ------------------------------------------------------------------------------

    def complete(self, **fields: Any) -> httpx.Response:
        """POST ``/v1/completions``."""
        return self.http.post("/v1/completions", json=_completion(fields))

    def stream(self, **fields: Any) -> Stream:
        """A streaming completion, in a connection of its own."""
        return Stream(self, _completion({"stream": True, **fields}))


class Stream:
    """One streaming completion, read at the test's own pace."""

    def __init__(self, server: Server, body: dict[str, Any]) -> None:
        self._client = httpx.Client(base_url=server.url, headers=server.headers, timeout=60.0)
        request = self._client.build_request("POST", "/v1/completions", json=body)
        self.response = self._client.send(request, stream=True)
        self.events: list[Any] = []
        """All events so far; the last word of a whole stream is ``[DONE]``."""
        self._rest = self._parse()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave, as a client that loses interest does."""
        self.response.close()
        self._client.close()

    def read(self, count: int) -> Stream:
        """Read ``count`` events more."""
        for _ in range(count):
            next(self._rest)
        return self

    def read_all(self) -> Stream:
        """Read to the end. Raises ``httpx.TransportError`` when the connection breaks."""
        for _ in self._rest:
            pass
        return self

    @property
    def choices(self) -> list[dict[str, Any]]:
        """The pieces of all outputs so far."""
        return [
            choice
            for event in self.events
            if event != "[DONE]"
            for choice in event.get("choices", [])
        ]

    def text(self, index: int = 0) -> str:
        """The text of one output so far."""
        return "".join(choice["text"] for choice in self.choices if choice["index"] == index)

    @property
    def whole(self) -> bool:
        """Whether it ended as a stream should."""
        return bool(self.events) and self.events[-1] == "[DONE]"

    @property
    def error(self) -> dict[str, Any] | None:
        """The error that the stream ended with."""
        last = self.events[-1] if self.events else None
        return last.get("error") if isinstance(last, dict) else None

    def _parse(self) -> Iterator[Any]:
        for line in self.response.iter_lines():
            if line.startswith("data: "):
                data = line.removeprefix("data: ")
                self.events.append(data if data == "[DONE]" else json.loads(data))
                yield self.events[-1]


def _completion(fields: dict[str, Any]) -> dict[str, Any]:
    return {"model": "base", "prompt": "the dog", "temperature": 0, "ignore_eos": True} | fields


def _role(command: list[str], environment: dict[str, str], pid: int) -> Role:
    if "server.main" in command:
        return "front end"
    if "torch.distributed.run" in command:
        return "torchrun"
    if any(word.startswith("--model=") for word in command):
        return int(environment.get("RANK", "0"))
    return f"{' '.join(command)} ({pid})"
