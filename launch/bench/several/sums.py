"""Under torchrun: microseconds of one sum over ranks inside a CUDA graph, by rows and method.

    torchrun --nproc-per-node N -m launch.bench.several.sums [--hidden 4096] [--rows 1 16 64 ...]

Every result is first checked: equal bits on all ranks, and those of the sum in rank order where a
method promises it. The link's rate is that of a large copy into a peer's memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory as symmetric_memory

from kernels.reduce.reference import sum_in_order
from tp_engine.config import EngineConfig
from tp_engine.ranks.comm import Comm
from tp_engine.ranks.join import connect
from tp_engine.ranks.symmetric import share_mailboxes

REPEATS = 20
"""Sums of one graph."""
REPLAYS = 9
COPY_BYTES = 2**28

Method = Callable[[Tensor], Tensor]


def methods(comm: Comm, largest: int, hidden: int) -> dict[str, Method]:
    """Ways to sum, by name; each may overwrite its argument."""
    assert comm.device_group is not None
    found: dict[str, Method] = {"nccl": replace(comm, mailboxes=None).all_reduce}
    if comm.mailboxes is None:
        return found
    found["mailboxes"] = comm.all_reduce
    shape = (largest, hidden)
    shared = symmetric_memory.empty(shape, dtype=torch.bfloat16, device=comm.device)
    symmetric_memory.rendezvous(shared, comm.device_group)
    name = comm.device_group.group_name

    def two_shot(x: Tensor) -> Tensor:
        part = shared[: x.shape[0]]
        part.copy_(x)
        total: Tensor = torch.ops.symm_mem.two_shot_all_reduce_(part, "sum", name)
        return total

    def one_shot(x: Tensor) -> Tensor:
        part = shared[: x.shape[0]]
        total: Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(part, x, "sum", name)
        return total

    return found | {"torch two-shot": two_shot, "torch one-shot": one_shot}


def wrong(comm: Comm, method: Method, rows: int, hidden: int) -> str | None:
    """What is wrong with a method's result, if anything is."""
    parts = []
    for rank in range(comm.world):
        random = torch.Generator(comm.device).manual_seed(1000 * rows + rank)
        part = torch.randn(rows, hidden, generator=random, device=comm.device)
        parts.append(part.bfloat16())
    total = method(parts[comm.rank].clone())
    everyone = [torch.empty_like(total) for _ in range(comm.world)]
    dist.all_gather(everyone, total.clone(), group=comm.device_group)
    if not all(torch.equal(each, everyone[0]) for each in everyone):
        return "ranks differ"
    error = (total.float() - sum_in_order(parts).float()).abs().max().item()
    return None if error <= 0.05 * comm.world else f"off by {error}"


def graph_us(comm: Comm, method: Method, rows: int, hidden: int) -> float:
    """Median time of one sum, in microseconds."""
    x = torch.zeros(rows, hidden, dtype=torch.bfloat16, device=comm.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(REPEATS):
            method(x)
    times = []
    for _ in range(REPLAYS):
        comm.gather_numbers([1])
        times.append(_timed(graph.replay) / REPEATS)
    return statistics.median(times)


def link_rate(comm: Comm) -> float:
    """Bytes a second of a copy into the next rank's memory, all ranks at once."""
    assert comm.device_group is not None
    shared = symmetric_memory.empty(COPY_BYTES, dtype=torch.uint8, device=comm.device)
    handle = symmetric_memory.rendezvous(shared, comm.device_group)
    peer = handle.get_buffer((comm.rank + 1) % comm.world, (COPY_BYTES,), torch.uint8)
    mine = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=comm.device)
    times = []
    for _ in range(5):
        comm.gather_numbers([1])
        times.append(_timed(lambda: peer.copy_(mine)))
    comm.gather_numbers([1])
    return COPY_BYTES / (min(times) * 1e-6)


def _timed(run: Callable[[], Any]) -> float:
    start, stop = _event(), _event()
    start.record()
    run()
    stop.record()
    stop.synchronize()
    return 1000 * float(start.elapsed_time(stop))


def _event() -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    return event


def main() -> None:
    """Check and measure; rank 0 prints one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 32, 64, 128, 256, 512, 2048])
    given = parser.parse_args()
    comm, _ = connect(EngineConfig(model="none"))
    comm = share_mailboxes(comm, row_bytes=2 * given.hidden)
    results: dict[str, Any] = {"ranks": comm.world, "hidden": given.hidden, "us": {}, "wrong": []}
    longest = {}
    if comm.mailboxes is not None:
        longest["mailboxes"] = int(comm.mailboxes.many.uses.shape[0])
        results["link_GB_per_s"] = round(link_rate(comm) / 1e9)
    for name, method in methods(comm, max(given.rows), given.hidden).items():
        for rows in given.rows:
            if rows > longest.get(name, rows):
                continue
            fault = wrong(comm, method, rows, given.hidden)
            if fault is not None:
                results["wrong"].append(f"{name}, {rows} rows: {fault}")
                continue
            took = graph_us(comm, method, rows, given.hidden)
            results["us"].setdefault(name, {})[rows] = round(took, 1)
    if comm.rank == 0:
        print(json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
