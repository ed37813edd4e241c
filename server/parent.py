"""Living no longer than rank 0."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.5


def ignore_stop_signals() -> None:
    """Leave stopping to rank 0, which tells the front end when it has drained."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)


def ask_for_death_signal() -> None:
    """Have the kernel send SIGUSR1 when the parent ends; Linux only, polling covers the rest."""
    if sys.platform == "linux":
        # Until `parent_gone` listens to it: the default is to end at once, with files left behind.
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGUSR1)


async def parent_gone(parent_pid: int) -> None:
    """Return when ``parent_pid`` is no longer this process's parent."""
    hint = asyncio.Event()
    # The signal also comes when only the parent's starting thread ends: it is no proof.
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, hint.set)
    while os.getppid() == parent_pid:
        hint.clear()
        try:
            await asyncio.wait_for(hint.wait(), _POLL_S)
        except TimeoutError:
            continue
