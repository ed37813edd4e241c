"""What is sent is finished and kept beside the steps, and a failure is heard of."""

from __future__ import annotations

import threading
import time
import weakref
from dataclasses import replace
from itertools import chain, repeat
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tp_engine.adapters import AdapterImage
from tp_engine.ranks.background import Ended, Together
from tp_engine.ranks.comm import Comm
from tp_engine.steps.plan import PlanKind, StepPlan
from tp_engine.steps.worker import Worker
from tp_engine.tiers.delivery import Delivery
from tp_engine.tiers.host_pages import HostPages

PAGE = 64


def image() -> AdapterImage:
    return AdapterImage(pages=torch.full((2, PAGE), 7, dtype=torch.uint8), record=torch.arange(3))


def wait(delivery: Delivery) -> list[Ended]:
    until = time.monotonic() + 20
    while time.monotonic() < until:
        if arrived := delivery.arrived():
            return arrived
        time.sleep(0.001)
    raise AssertionError("nothing arrived")


def test_a_slow_finish_holds_up_nobody_and_its_result_is_what_is_kept() -> None:
    host, gate = HostPages(4, PAGE, pinned=False), threading.Event()

    def finish(sent: AdapterImage, together: Together) -> AdapterImage:
        assert gate.wait(20)
        return replace(sent, pages=sent.pages + 1)

    delivery = Delivery(Comm.alone(torch.device("cpu")), host, finish)
    delivery.begin(5, 3, [3, 1], [image()])  # returns although the work waits
    assert delivery.arrived() == []
    gate.set()
    assert wait(delivery) == [(5, None)]
    assert host.copy_of(5).pages == [3, 1]
    assert bool((host.memory[[1, 3]] == 8).all())


def test_what_cannot_be_finished_is_an_error_for_the_loop() -> None:
    def finish(sent: AdapterImage, together: Together) -> AdapterImage:
        raise ValueError("no gains")

    host = HostPages(4, PAGE, pinned=False)
    delivery = Delivery(Comm.alone(torch.device("cpu")), host, finish)
    delivery.begin(5, 3, [0, 1], [image()])
    with pytest.raises(RuntimeError, match="DELIVERY") as caught:
        wait(delivery)
    assert str(caught.value.__cause__) == "no gains"


def test_a_rank_that_follows_ends_with_what_failed_beside_its_steps() -> None:
    def finish(sent: AdapterImage, together: Together) -> AdapterImage:
        raise ValueError("no gains")

    comm: Any = SimpleNamespace(
        rank=1,
        world=2,
        device=torch.device("cpu"),
        scatter_background=lambda parts, mine: mine.zero_(),
        gather_background=lambda lane, values: [values],
    )
    arena = SimpleNamespace(memory=torch.zeros(PAGE, dtype=torch.uint8), descriptors=None)
    runner: Any = SimpleNamespace(arena=arena, layers=1, ends=None)
    gains: Any = SimpleNamespace(finish=finish)
    worker = Worker(comm, runner, HostPages(4, PAGE, pinned=False), gains)
    plans = chain(
        [StepPlan(kind=PlanKind.DELIVER, step=0, adapter=np.array([5, 3, 0, 1]))],
        repeat(StepPlan(kind=PlanKind.HEARTBEAT, step=1), 5_000),
        [StepPlan(kind=PlanKind.STOP, step=2)],
    )
    worker.channel.receive = lambda: next(plans)  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="DELIVERY") as caught:
        worker.follow(lambda: time.sleep(0.0005))
    assert str(caught.value.__cause__) == "no gains"


@pytest.mark.parametrize("short", [False, True])
def test_what_was_sent_is_not_kept(short: bool) -> None:
    def finish(image: AdapterImage, together: Together) -> AdapterImage:
        size = 1 << 50 if short else 1
        return together("a test", size, lambda: replace(image, row_bytes=len(bytearray(size))))

    sent = image()
    alive = weakref.ref(sent.pages)
    host = HostPages(4, PAGE, pinned=False)
    delivery = Delivery(Comm.alone(torch.device("cpu")), host, finish)
    delivery.begin(5, 3, [0, 1], [sent])
    del sent
    (ended,) = wait(delivery)
    assert (ended.shortage is not None) is short
    until = time.monotonic() + 20
    while alive() is not None and time.monotonic() < until:
        time.sleep(0.001)
    assert alive() is None, "the thread holds it until something else is sent"
