"""Time to the first token by the tier on which the adapter is found, against the copies' floor."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from launch.bench.tiers.material import leave_page_cache
from tp_engine import SamplingParams
from tp_engine.engine import Engine
from tp_engine.fleet import AdapterLoader
from tp_engine.memory import AdapterFootprint
from tp_engine.messages import Output, Submit

PROMPT_TOKENS = 128
_ids = itertools.count()


def first_token_s(engine: Engine, digest: str) -> float:
    """Seconds from a request to its first token, on an idle engine."""
    number = next(_ids)
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    prompt = [(number * 7919 + j * 31) % 900 + 50 for j in range(PROMPT_TOKENS)]
    message = Submit(request_id=f"first {number}", model="", prompt=prompt, params=params)
    start = time.perf_counter()
    engine.submit(message, digest)
    while True:
        for output in engine.step():
            assert isinstance(output, Output), output
            return time.perf_counter() - start


def measure_first_tokens(
    engine: Engine, loader: AdapterLoader, directories: dict[str, Path], repeats: int
) -> dict[str, Any]:
    """Seconds by tier (medians), the bytes that each moves, and how far from the floor it is.

    Args:
        engine: idle, of rank 0.
        loader: reads the adapters.
        directories: of the adapters' files, by digest.
        repeats: of each adapter and tier.
    """
    adapters = [engine.adapters[digest] for digest in directories]
    for adapter in adapters:
        first_token_s(engine, adapter.digest)
    cool: dict[str, Callable[[AdapterFootprint], object]] = {
        "resident": lambda adapter: None,
        "warm": lambda adapter: engine.residency.forget(adapter.handle),
        "cold": lambda adapter: _make_cold(engine, adapter, directories[adapter.digest]),
    }
    seconds: dict[str, list[float]] = {}
    for tier, make in cool.items():
        for adapter in adapters * repeats:
            if tier == "resident":
                first_token_s(engine, adapter.digest)  # its pages may have been needed
            make(adapter)
            seconds.setdefault(tier, []).append(first_token_s(engine, adapter.digest))
    report = _report(engine, seconds, directories)
    return report | {"cold_parts_ms": _cold_parts_ms(loader, next(iter(directories.values())))}


def _make_cold(engine: Engine, adapter: AdapterFootprint, directory: Path) -> None:
    engine.tiers.forget(adapter.handle)
    leave_page_cache(directory)


def _cold_parts_ms(loader: AdapterLoader, directory: Path) -> dict[str, float]:
    """What of a cold start the reader's thread takes, on its own."""
    leave_page_cache(directory)
    start = time.perf_counter()
    revision = loader.read(directory)
    read = time.perf_counter()
    loader.pack(revision)
    packed = time.perf_counter()
    return {
        "read_and_check": round(1000 * (read - start), 1),
        "cut_and_pack": round(1000 * (packed - read), 1),
    }


def _report(
    engine: Engine, seconds: dict[str, list[float]], directories: dict[str, Path]
) -> dict[str, Any]:
    medians = {tier: statistics.median(each) for tier, each in seconds.items()}
    adapter = engine.adapters[next(iter(directories))]
    image = adapter.pages * engine.layout.page_bytes
    directory = next(iter(directories.values()))
    file_bytes, read_s = _read_floor(directory)
    copy_s = copy_floor_s(engine, image)
    return {
        "ms": {tier: round(1000 * value, 3) for tier, value in medians.items()},
        "worst_ms": {tier: round(1000 * max(each), 3) for tier, each in seconds.items()},
        "image_bytes_a_rank": image,
        "file_bytes": file_bytes,
        "copy_floor_ms": round(1000 * copy_s, 3),
        "copy_GB_s": round(image / copy_s / 1e9, 2),
        "read_floor_ms": round(1000 * read_s, 3),
        "read_GB_s": round(file_bytes / read_s / 1e9, 2),
        "warm_over_floor": round((medians["warm"] - medians["resident"]) / copy_s, 2),
        "cold_over_floor": round((medians["cold"] - medians["resident"]) / (copy_s + read_s), 2),
    }


def copy_floor_s(engine: Engine, size: int) -> float:
    """Seconds of one plain copy of so many bytes from (pinned) host memory to the arena."""
    arena = engine.worker.runner.arena.memory
    size = min(size, arena.numel() // 2)
    source = torch.zeros(size, dtype=torch.uint8, pin_memory=arena.is_cuda)
    target = torch.empty(size, dtype=torch.uint8, device=arena.device)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        target.copy_(source, non_blocking=True)
        if arena.is_cuda:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best


def _read_floor(directory: Path) -> tuple[int, float]:
    """Bytes of a directory's files, and the seconds to read them plainly from the disk."""
    size = leave_page_cache(directory)
    start = time.perf_counter()
    for path in directory.iterdir():
        with path.open("rb", buffering=0) as file:
            while file.read(8 * 2**20):
                pass
    return size, time.perf_counter() - start
