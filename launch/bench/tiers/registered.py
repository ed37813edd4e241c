"""What many registered adapters cost a start, and a request that names one of them."""

from __future__ import annotations

import gc
import random
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

from launch.bench.tiers.material import write_adapter
from tp_engine.adapters import AdapterRegistry
from tp_engine.adapters.store import AdapterStore
from tp_engine.engine import Engine
from tp_engine.fleet import AdapterLoader, StartingAdapters
from tp_engine.rank import Rank, build_engine

LOOKUPS = 20_000


def measure_registered(
    rank: Rank, open_store: Callable[[], AdapterStore], directory: Path, counts: list[int]
) -> dict[str, Any]:
    """Start-up time, memory and lookup cost at each number of registered adapters.

    Each has one module of LoRA rank 1, so that the disk holds them: a start reads none of them.

    Args:
        rank: of world size 1.
        open_store: opens the same, empty store anew.
        directory: for the adapters' sources.
        counts: ascending.
    """
    results: dict[str, Any] = {}
    registered = 0
    for count in counts:
        start = time.perf_counter()
        store = open_store()
        loader = AdapterLoader(rank, store)
        for number in range(registered, count):
            _register(loader, rank, directory, number)
        seconds = time.perf_counter() - start
        store.close()
        added, registered = count - registered, count
        results[str(count)] = {
            "register_ms_each": round(1000 * seconds / added, 2),
            **_start(rank, open_store, count),
        }
    return results


def _register(loader: AdapterLoader, rank: Rank, directory: Path, number: int) -> None:
    source = directory / f"many-{number}"
    write_adapter(source, rank.dims, rank=1, seed=number, sites=["q_proj"], layers=1)
    revision, _ = loader.load(source)
    loader.record(f"many-{number}", revision.digest)


def _start(rank: Rank, open_store: Callable[[], AdapterStore], count: int) -> dict[str, Any]:
    start = time.perf_counter()
    store = open_store()
    opened = time.perf_counter()
    registry, _ = _know_all(rank, store)
    ended = time.perf_counter()
    assert len(registry.adapters) == count
    lookup = _lookup_us(registry, count)
    gc.collect()
    tracemalloc.start()
    kept = _know_all(rank, store)  # registry and engine, so that both count
    gc.collect()
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(kept[0].adapters) == count
    store.close()
    return {
        "open_store_ms": round(1000 * (opened - start), 1),
        "know_all_ms": round(1000 * (ended - opened), 1),
        "memory_bytes_each": round(grown / count),
        "lookup_us": round(lookup, 2),
    }


def _know_all(rank: Rank, store: AdapterStore) -> tuple[AdapterRegistry, Engine]:
    """What a start does with a store, up to where requests may ask for its adapters."""
    loader = AdapterLoader(rank, store)
    engine = build_engine(rank, loader.fetch)
    starting = StartingAdapters(loader, engine.tiers.host.num_pages)
    registry = AdapterRegistry(["base"])
    starting.restore(registry)
    starting.hand_out(engine, registry, "fail")
    assert len(engine.adapters) == len(registry.adapters) and engine.tiers.fetches == 0
    return registry, engine


def _lookup_us(registry: AdapterRegistry, count: int) -> float:
    names = [f"many-{number}" for number in random.Random(0).choices(range(count), k=1000)]
    start = time.perf_counter()
    for i in range(LOOKUPS):
        registry.resolve(names[i % 1000])
    return (time.perf_counter() - start) / LOOKUPS * 1e6
