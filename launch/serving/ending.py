"""Signals, and the end of a process that cannot go on."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from tp_engine.ranks.liveness import Liveness

log = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""torchrun passes all of these on to every rank."""
SAME_PRESS_SECONDS = 0.5
"""A terminal and torchrun may both deliver one Ctrl-C."""
LOSS_SECONDS = 2.0
"""For a lost peer to show, once a collective has failed."""
LAST_WORDS_SECONDS = 2.0
"""For the log to take the reason of an end; nobody may be reading it."""

_ending = threading.Lock()


def end_now(reason: str, code: int = 1) -> NoReturn:
    """End this process at once, from any thread, even while the main one is in a collective.

    The first reason is the one that counts.
    """
    _ending.acquire()  # never released: whoever comes second waits here for the end
    timer = threading.Timer(LAST_WORDS_SECONDS, os._exit, (code,))
    timer.daemon = True
    timer.start()
    log.critical("the service ends: %s", reason)
    logging.shutdown()
    os._exit(code)


def end_if_lost(liveness: Liveness) -> None:
    """After a failed collective: end the process with the name of the peer that is gone.

    Collectives fail with the name of whichever connection broke first, and that peer may only have
    followed another.
    """
    if (reason := liveness.reason(LOSS_SECONDS)) is not None:
        end_now(reason)


def serving_signals(handle: Callable[[int], None]) -> None:
    """From now on call ``handle`` with the number of a stop signal, instead of ending."""
    for number in STOP_SIGNALS:
        signal.signal(number, lambda number, _: handle(number))


class StopRequest:
    """Whether a stop was asked for; a second Ctrl-C quits at once.

    torchrun answers its second Ctrl-C with SIGTERM to the ranks, so that any signal counts as one
    once there was a first.
    """

    def __init__(self) -> None:
        self.asked = False
        self._interrupted: float | None = None

    def handle(self, number: int) -> None:
        """Take note of a stop signal."""
        self.asked = True
        now = time.monotonic()
        if self._interrupted is None:
            self._interrupted = now if number == signal.SIGINT else None
        elif now - self._interrupted > SAME_PRESS_SECONDS:
            end_now("interrupted twice", code=128 + signal.SIGINT)
