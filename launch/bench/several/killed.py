"""A service on several ranks loses one while it works: how long until clients know and it ends."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from launch.bench.several.files import COMMON, UNEVEN, write_checkpoint
from launch.bench.several.processes import end, start, torchrun, tree
from launch.bench.tokenizer import write_tokenizer

RANK_TIMEOUT = 8.0
READY_SECONDS = 90.0


def lose_a_rank(
    ranks: int, scratch: Path, how: signal.Signals, options: list[str]
) -> dict[str, Any]:
    """Serve, send the last rank a signal while a request runs, and see what happens.

    Returns:
        ``ok``, and the seconds until the client had its error and until all had ended.
    """
    model = scratch / "model"
    if not model.exists():
        write_checkpoint(model, UNEVEN["28 heads in 4 groups"], nf4=True, seed=0)
        write_tokenizer(model, COMMON["vocab_size"])
    port, log = _free_port(), scratch / f"{how.name}.log"
    command = torchrun(ranks, "launch/serve.py", f"--model={model}", f"--port={port}", *options)
    command += ["--served-model-name=base", f"--rank-timeout={RANK_TIMEOUT:g}", "--max-num-seqs=4"]
    service = start(command, log)
    try:
        return _lose(service, f"http://127.0.0.1:{port}", ranks - 1, how, log)
    finally:
        end(service)


def _lose(
    service: subprocess.Popen[bytes], url: str, victim: int, how: signal.Signals, log: Path
) -> dict[str, Any]:
    _wait(lambda: _get(f"{url}/ready") is not None, READY_SECONDS, service)
    with ThreadPoolExecutor() as pool:
        answer: Future[tuple[int, str]] = pool.submit(_complete, url)
        running = "vllm:num_requests_running 1.0"
        _wait(lambda: running in (_get(f"{url}/metrics") or ""), 30, service)
        began = time.monotonic()
        _process_of(service, victim).send_signal(how)
        status, text = answer.result(RANK_TIMEOUT + 10)
        told = time.monotonic() - began
        code = service.wait(RANK_TIMEOUT + 20)
    ended = time.monotonic() - began
    named = f"the service ends: rank {victim} " in log.read_text("utf-8", "replace")
    return {
        "ok": code != 0 and status == 503 and "engine_dead" in text and named,
        "client_s": round(told, 2),
        "ended_s": round(ended, 2),
    }


def _complete(url: str) -> tuple[int, str]:
    """Status and body of a request that takes far longer than the test."""
    body = {"model": "base", "prompt": list(range(20)), "max_tokens": 2000, "ignore_eos": True}
    data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def _get(url: str) -> str | None:
    with suppress(OSError), urllib.request.urlopen(url, timeout=5) as response:
        text: str = response.read().decode()
        return text
    return None


def _wait(condition: Any, seconds: float, service: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline or service.poll() is not None:
            raise RuntimeError("the service did not get ready, or not to work")
        time.sleep(0.05)


def _process_of(service: subprocess.Popen[bytes], rank: int) -> psutil.Process:
    for process in tree(service):
        with suppress(psutil.NoSuchProcess):
            if process.environ().get("RANK") == str(rank) and "launch/serve.py" in " ".join(
                process.cmdline()
            ):
                return process
    raise RuntimeError(f"rank {rank} is not there")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
