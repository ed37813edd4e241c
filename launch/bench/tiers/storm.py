"""How long decode steps take with and without adapters that come and go beside them."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from tp_engine import SamplingParams
from tp_engine.engine import Engine
from tp_engine.memory import AdapterFootprint
from tp_engine.messages import Submit

PROMPT_TOKENS = 64
WARM_STEPS = 16
BINS = 1.1
"""Each bin of the histogram ends where it began times this."""


def measure_steps(engine: Engine, digests: list[str], *, batch: int, steps: int) -> dict[str, Any]:
    """Step times while ``batch`` requests of the base decode: alone, beside copies of warm
    adapters into the arena, and beside reads of cold ones."""
    adapters = [engine.adapters[digest] for digest in digests]
    storms: dict[str, Iterator[None]] = {
        "quiet": itertools.repeat(None),
        "warm_storm": _warm_storm(engine, adapters),
        "cold_storm": _cold_storm(engine, adapters),
    }
    results: dict[str, Any] = {}
    for name, storm in storms.items():
        before = engine.residency.loads, engine.tiers.fetches
        times = _step_times(engine, storm, batch=batch, steps=steps)
        results[name] = _summary(times) | {
            "copies": engine.residency.loads - before[0],
            "reads": engine.tiers.fetches - before[1],
        }
        settle(engine)
    quiet = results["quiet"]
    for name in ("warm_storm", "cold_storm"):
        for mark in ("p50", "p99"):
            added = results[name][f"{mark}_us"] - quiet[f"{mark}_us"]
            results[name][f"{mark}_longer_us"] = round(added, 1)
    results["launch_us"] = round(launch_us(engine), 2)
    return results


def settle(engine: Engine) -> None:
    """Let everything that is on its way arrive."""
    while engine.tiers.busy:
        engine.step()


def _step_times(
    engine: Engine, storm: Iterator[None], *, batch: int, steps: int
) -> np.ndarray[Any, np.dtype[np.float64]]:
    params = SamplingParams(temperature=0.0, max_tokens=steps + 2 * WARM_STEPS + 8, ignore_eos=True)
    for i in range(batch):
        prompt = [(i * 7919 + j * 31) % 900 + 50 for j in range(PROMPT_TOKENS)]
        engine.submit(Submit(request_id=f"decode {i}", model="", prompt=prompt, params=params), "")
    while any(r.output_len < WARM_STEPS for r in engine.requests.values()):
        engine.step()
    times = np.empty(steps)
    last = time.perf_counter()
    for i in range(steps):
        next(storm)
        assert engine.step(), "a decode step ends in every turn"
        now = time.perf_counter()
        times[i], last = now - last, now
    for request_id in list(engine.requests):
        engine.abort(request_id)
    engine.step()
    return times


def _warm_storm(engine: Engine, adapters: list[AdapterFootprint]) -> Iterator[None]:
    """One copy after the other, each into pages that the one before has left."""
    for adapter in itertools.cycle(adapters):
        if not engine.residency.is_resident(adapter.handle):
            engine.tiers.bring(adapter, spare=0)
        while not engine.residency.is_resident(adapter.handle):
            yield
        engine.residency.forget(adapter.handle)


def _cold_storm(engine: Engine, adapters: list[AdapterFootprint]) -> Iterator[None]:
    """One read after the other, each delivered to the hosts and dropped there."""
    for adapter in itertools.cycle(adapters):
        engine.tiers.forget(adapter.handle)
        engine.tiers.prefetch(adapter)
        while not engine.tiers.is_at_hand(adapter.handle):
            yield


def _summary(times: np.ndarray[Any, np.dtype[np.float64]]) -> dict[str, Any]:
    marks = {"p50": 50, "p90": 90, "p99": 99, "max": 100}
    bins = Counter(np.floor(np.log(times * 1e6) / np.log(BINS)).astype(int).tolist())
    return {
        **{f"{m}_us": round(float(np.percentile(times, p)) * 1e6, 1) for m, p in marks.items()},
        "histogram_us": {str(round(BINS**n)): bins[n] for n in sorted(bins)},
    }


def launch_us(engine: Engine) -> float:
    """Microseconds of the host for one small kernel, which a step would pay for one launch."""
    x = torch.zeros(16, device=engine.worker.runner.arena.memory.device)
    for _ in range(100):
        x.add_(1)
    start = time.perf_counter()
    for _ in range(1000):
        x.add_(1)
    return (time.perf_counter() - start) * 1e3
