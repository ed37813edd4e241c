"""Python itself in a process that serves: what goes on beside the steps may not hold them up."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")

BURST_SECONDS = 0.0003
PAUSE_SECONDS = 0.0005
"""Longer than `BURST_SECONDS`: what the loop does on the host between two steps takes 1 ms."""
IDLE_BURST_SECONDS = 0.001
IDLE_PAUSE_SECONDS = 0.0001
"""While the loop has no step: for it to wake up in, if something has come."""


def freeze_objects() -> None:
    """Spare the collector what exists now: modules, weights, the application.

    A full collection looks at all objects, about 200,000 once torch and transformers are loaded:
    0.2 s in which no step begins and no token is sent.
    """
    gc.collect()
    gc.freeze()


class _Loop:
    idle = False


class _Pauses(threading.local):
    last = 0.0


_loop = _Loop()
_pauses = _Pauses()


@contextmanager
def idle() -> Iterator[None]:
    """Around a wait of the loop that runs the steps, while it has no step to run or to end.

    What goes on beside it gives way only as much as the loop needs to wake up. The loop alone says
    so, and takes it back as the first thing after the wait, before it looks at what has come: so
    it is never idle while it makes or runs a step.
    """
    _loop.idle = True
    try:
        yield
    finally:
        _loop.idle = False


def giving_way(items: Iterable[T]) -> Iterator[T]:
    """The same items, for loops of Python code beside the steps: with pauses between them.

    Who launches work on a GPU lets go of the interpreter dozens of times a step. Each time a thread
    that wants it takes it, for `sys.getswitchinterval` at least, so a step waits until that thread
    has no more to do. While the loop is `idle` the pauses are fewer and shorter; in the main thread
    there is nobody to give way to.
    """
    beside = threading.current_thread() is not threading.main_thread()
    for item in items:
        burst = IDLE_BURST_SECONDS if _loop.idle else BURST_SECONDS
        if beside and time.perf_counter() - _pauses.last > burst:
            time.sleep(IDLE_PAUSE_SECONDS if _loop.idle else PAUSE_SECONDS)
            _pauses.last = time.perf_counter()
        yield item
