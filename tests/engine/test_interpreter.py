"""What a process that serves asks of Python itself."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch

from sharding import cut_model
from tests.adapters.writing import (
    every_site,
    plain_config,
    random_modules,
    tensors_of,
    write_adapter,
)
from tests.engine.fake import drive, image, make_engine, solo, submit
from tests.helpers.tiny_models import make_checkpoint
from tp_engine import interpreter
from tp_engine.adapters import ImageSize, pack_adapter, read_adapter
from tp_engine.adapters.record import gain_places
from tp_engine.interpreter import freeze_objects, giving_way, idle
from tp_engine.link import FrontEndLink
from tp_engine.models.spec import ModelSpec
from tp_engine.params import SamplingParams


def test_loops_pause_less_beside_an_idle_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    clock = SimpleNamespace(sleep=pauses.append, perf_counter=time.perf_counter)
    monkeypatch.setattr(interpreter, "time", clock)
    monkeypatch.setattr(interpreter, "BURST_SECONDS", -1.0)

    def items() -> Iterator[int]:
        yield 1
        with idle():
            yield from (2, 3, 4)
        yield from (5, 6)

    def pauses_of(idle_burst: float) -> list[float]:
        monkeypatch.setattr(interpreter, "IDLE_BURST_SECONDS", idle_burst)
        pauses.clear()
        with ThreadPoolExecutor(1) as thread:
            assert thread.submit(lambda: [*giving_way(items())]).result() == [1, 2, 3, 4, 5, 6]
        return pauses[:]

    long, short = interpreter.PAUSE_SECONDS, interpreter.IDLE_PAUSE_SECONDS
    assert pauses_of(1e9) == [long, long, long]
    assert pauses_of(-1.0) == [long, short, short, short, long, long]
    pauses.clear()
    assert [*giving_way(items())] == [1, 2, 3, 4, 5, 6] and not pauses, "in the main thread"


def test_the_loop_is_idle_while_it_waits_and_never_while_it_has_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read = threading.Event()

    def fetch(digest: str) -> list[Any]:
        assert read.wait(10)
        return [image(digest)]

    waits: list[bool] = []

    def sleep(seconds: float) -> None:
        waits.append(interpreter._loop.idle)
        read.set()
        time.sleep(seconds)

    clock = SimpleNamespace(sleep=sleep, monotonic=time.monotonic)
    monkeypatch.setattr("tp_engine.tiers.tiers.time", clock)
    engine, worker = make_engine(fetch=fetch)
    carry_out = worker.run

    def run(*arguments: Any) -> Any:
        assert not interpreter._loop.idle
        return carry_out(*arguments)

    monkeypatch.setattr(worker, "run", run)
    engine.roster.begin("x", "x", ImageSize(2, 8, 4, 0, 200), None)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    submit(engine, "r", [1, 2, 3], params, SimpleNamespace(digest="x"))
    assert drive(engine)["r"] == solo("x", [1, 2, 3], params)
    assert waits and all(waits) and not interpreter._loop.idle


class Polled:
    """A socket that tells whether the loop was idle when it was polled."""

    def __init__(self, socket: Any, seen: list[bool]) -> None:
        self._socket, self._seen = socket, seen

    def poll(self, timeout: int) -> int:
        self._seen.append(interpreter._loop.idle)
        return int(self._socket.poll(timeout))

    def close(self, linger: int) -> None:
        self._socket.close(linger=linger)


@pytest.mark.parametrize(("timeout", "waits"), [(0.0, False), (0.001, True)])
def test_the_loop_is_idle_while_it_waits_for_messages_but_not_when_it_looks(
    timeout: float, waits: bool
) -> None:
    seen: list[bool] = []
    link = FrontEndLink()
    with closing(link):
        link._pull = Polled(link._pull, seen)  # type: ignore[assignment]
        assert link.receive(timeout) == []
    assert seen == [waits] and not interpreter._loop.idle


def test_what_exists_is_not_looked_at_again() -> None:
    before = gc.get_freeze_count()
    made = [[] for _ in range(1000)]
    freeze_objects()
    try:
        assert gc.get_freeze_count() >= before + len(made)
    finally:
        gc.unfreeze()


LETS_OTHERS_RUN = {"sleep", "preadv", "update", "copy_"}
"""Names of calls that do."""


def longest_stretch(work: Callable[[], object]) -> int:
    """The most calls that a thread makes, at its work, without one that lets others run."""
    longest = stretch = 0

    def count(frame: FrameType, event: str, what: Any) -> None:
        nonlocal longest, stretch
        if event == "c_call" and what.__name__ in LETS_OTHERS_RUN:
            stretch = 0
        elif event in ("call", "c_call"):
            stretch += 1
        longest = max(longest, stretch)

    def watched() -> None:
        sys.setprofile(count)
        try:
            work()
        finally:
            sys.setprofile(None)

    with ThreadPoolExecutor(1) as thread:
        thread.submit(watched).result()
    return longest


def test_no_loop_over_the_tensors_of_an_adapter_keeps_the_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interpreter, "BURST_SECONDS", -1.0)
    monkeypatch.setattr(interpreter, "PAUSE_SECONDS", 0.0)
    base = make_checkpoint(tmp_path / "base", "llama")
    spec = replace(ModelSpec.from_directory(base), num_layers=40)
    dims = spec.dims()
    modules = random_modules(dims, every_site(dims), seed=0)
    adapter = write_adapter(tmp_path / "adapter", plain_config(), tensors_of(modules))

    def bring() -> None:
        revision = read_adapter(adapter, spec)
        (image,) = pack_adapter(revision, cut_model(dims, 1), dims, torch.float32, 1 << 16)
        gain_places(image.record, dims.layers)

    assert longest_stretch(bring) < 10 * len(modules), "a loop makes more calls a module"
