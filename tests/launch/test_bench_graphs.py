"""Times of captured launches, on a device that is made up."""

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch

from launch.bench.graphs import WARM_REPLAYS, graph_us


class Graph:
    """Replays that take 9 ms until it is warm, then 1, 2, 3 ms in turn."""

    def __init__(self) -> None:
        self.now, self._took = 0.0, self._times()

    def replay(self) -> None:
        self.now += next(self._took)

    def _times(self) -> Iterator[float]:
        yield from [9.0] * WARM_REPLAYS
        while True:
            yield from (1.0, 2.0, 3.0)


class Event:
    graph: Graph

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.at = -1.0

    def record(self) -> None:
        self.at = self.graph.now

    def synchronize(self) -> None:
        assert self.at >= 0.0

    def elapsed_time(self, stop: "Event") -> float:
        return stop.at - self.at


def test_a_call_takes_its_share_of_the_median_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    Event.graph = Graph()
    for name, fake in (
        ("synchronize", lambda: None),
        ("CUDAGraph", lambda: Event.graph),
        ("graph", lambda graph: nullcontext()),
        ("Event", Event),
    ):
        monkeypatch.setattr(torch.cuda, name, fake)
    calls: list[str] = []
    took = graph_us([lambda: calls.append("a"), lambda: calls.append("b")], replays=9)
    assert took == pytest.approx(2000.0 / 2)
    assert calls == ["a", "b"] * 2  # once outside of the capture, once in it
