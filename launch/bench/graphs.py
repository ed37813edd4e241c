"""Times of captured launches: what they add to a captured step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

import torch

REPLAYS = 20
"""Of which the median is taken, after `WARM_REPLAYS`."""
WARM_REPLAYS = 3

Call = Callable[[], object]


def graph_us(calls: Sequence[Call], replays: int = REPLAYS) -> float:
    """Median microseconds a call of a graph of all calls, after each ran once outside of it."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times: list[float] = []
    for _ in range(WARM_REPLAYS + replays):
        start, stop = torch.cuda.Event(True), torch.cuda.Event(True)  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return median(times[WARM_REPLAYS:]) * 1e3 / len(calls)


def read_ceiling() -> float:
    """TB/s of a sum over 4 GiB."""
    data = torch.ones(2**30, dtype=torch.float32, device="cuda")
    return data.nbytes / graph_us([data.sum] * 4) / 1e6


__all__ = ["Call", "graph_us", "read_ceiling"]
