"""Times of captured launches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

import torch

REPLAYS = 20
"""Graph replays of which the median is taken."""
BEYOND_L2 = 256 * 2**20
"""Bytes that a graph reads at least before it reads the same again."""
DEVICE = "cuda"
Call = Callable[[], object]


def graph_us(calls: Sequence[Call]) -> float:
    """Median microseconds a call of a graph of all calls, after each ran once outside of it."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    for _ in range(3):
        graph.replay()
    times: list[float] = []
    for _ in range(REPLAYS):
        start, stop = torch.cuda.Event(True), torch.cuda.Event(True)  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return median(times) * 1e3 / len(calls)


def peer_us(calls: Sequence[Call]) -> float | str:
    """`graph_us` of what may not run here (another library's op, a tile), or why it doesn't."""
    try:
        return graph_us(calls)
    except Exception as error:  # whatever another library raises is its result here
        return f"{type(error).__name__}: {str(error)[:200]}"


def read_ceiling() -> float:
    """TB/s of a sum over 4 GiB."""
    data = torch.ones(2**30, dtype=torch.float32, device=DEVICE)
    return data.numel() * 4 / graph_us([data.sum] * 4) / 1e6
