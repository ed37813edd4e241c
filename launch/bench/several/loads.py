"""Adapters loaded into a running service, one by one and all at once, while a stream goes on.

    python -m launch.bench.several.loads --ranks N [--shapes llama-3.1-8b] [--quantize nf4]

A load ends when requests may use the adapter; its first request brings it into the arena. What the
stream notices are the gaps between its tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.client import HTTPResponse
from itertools import pairwise
from pathlib import Path
from typing import Any

from launch.bench.load.client import Target
from launch.bench.load.server import BASE, make_model, started
from launch.bench.shapes import SHAPES

KEY = "operator"
LORA_RANK = 16
QUIET_TOKENS = 64
"""Of the stream, before the first load."""


class Stream:
    """A stream of the base's tokens, and when each arrived."""

    def __init__(self, target: Target, tokens: int) -> None:
        self.arrivals: list[float] = []
        self._response = ask(target, BASE, tokens, stream=True)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        for line in self._response:
            if line.startswith(b"data: {"):
                self.arrivals.append(time.perf_counter())

    def gaps(self, start: float, stop: float) -> list[float]:
        """Milliseconds between tokens of a time; at least one token must have arrived in it."""
        times = [when for when in self.arrivals if start <= when <= stop]
        return [1000 * (b - a) for a, b in pairwise(times)]


def post(target: Target, path: str, body: dict[str, Any]) -> HTTPResponse:
    """Send JSON; raises ``urllib.error.HTTPError`` when it is refused."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    url = f"http://{target.host}:{target.port}{path}"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    response: HTTPResponse = urllib.request.urlopen(request, timeout=120)
    return response


def ask(target: Target, model: str, tokens: int, *, stream: bool = False) -> HTTPResponse:
    """A greedy completion that does not end early."""
    body = {"model": model, "prompt": list(range(8)), "max_tokens": tokens, "temperature": 0}
    return post(target, "/v1/completions", {**body, "ignore_eos": True, "stream": stream})


def load(target: Target, name: str, path: Path) -> tuple[float, float, float]:
    """Seconds of the load, of the first request and of one more."""
    marks = [time.perf_counter()]
    for step in ("load", "cold", "warm"):
        if step == "load":
            body = {"lora_name": name, "lora_path": str(path)}
            post(target, "/v1/load_lora_adapter", body).read()
        else:
            ask(target, name, 1).read()
        marks.append(time.perf_counter())
    return marks[1] - marks[0], marks[2] - marks[1], marks[3] - marks[2]


def measure(target: Target, adapters: dict[str, Path]) -> dict[str, Any]:
    """Half of the adapters one by one, the rest together."""
    stream = Stream(target, 4000)
    while len(stream.arrivals) < QUIET_TOKENS:
        time.sleep(0.01)
    quiet = stream.gaps(0.0, time.perf_counter())[QUIET_TOKENS // 4 :]
    names = list(adapters)
    half = len(names) // 2
    start = time.perf_counter()
    single = [load(target, name, adapters[name]) for name in names[:half]]
    middle = time.perf_counter()
    with ThreadPoolExecutor(len(names) - half) as pool:
        storm = list(pool.map(lambda name: load(target, name, adapters[name]), names[half:]))
    end = time.perf_counter()
    columns = [round(1000 * statistics.median(each)) for each in zip(*single, strict=True)]
    return {
        "one_by_one_ms": dict(zip(("load", "first request", "next request"), columns, strict=True)),
        "storm": {"adapters": len(storm), "ms": round(1000 * (end - middle))},
        "gap_ms": {
            "quiet, median": round(statistics.median(quiet), 2),
            "quiet, largest": round(max(quiet), 2),
            "loads, largest": round(max(stream.gaps(start, middle)), 2),
            "storm, largest": round(max(stream.gaps(middle, end)), 2),
        },
    }


def main() -> None:
    """Start the service, measure, print one JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--shapes", choices=sorted(SHAPES), default="llama-3.1-8b")
    parser.add_argument("--quantize", choices=["nf4"])
    parser.add_argument("--adapters", type=int, default=12)
    parser.add_argument("--device", default="auto")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        made = make_model(Path(directory), given.shapes, given.adapters, LORA_RANK, 1)
        keys = Path(directory) / "admin.keys"
        keys.write_text(KEY)
        keys.chmod(0o600)
        options = [f"--admin-key-file={keys}", f"--adapter-root={directory}/adapters"]
        options += ["--max-model-len=4096", "--max-num-seqs=16", "--drain-timeout=1"]
        options += [f"--device={given.device}"]
        options += [f"--quantize={given.quantize}"] if given.quantize else []
        with started(replace(made, adapters={}), given.ranks, options) as target:
            found = measure(target, made.adapters)
    print(json.dumps({"ranks": given.ranks, **found}), flush=True)


if __name__ == "__main__":
    main()
