"""Memory that is asked for while an adapter is brought and is not given: that load ends, no more.

Of what can go wrong in the threads that bring adapters this alone comes from outside, may be over a
moment later, and leaves nothing half changed. An adapter's own faults are refused by name, a full
disk is an OSError, a rank that is lost ends the service, and so does a broken invariant.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Final, ParamSpec, TypeVar

import torch

from tp_engine.adapters.errors import OutOfMemory

P = ParamSpec("P")
T = TypeVar("T")

_TEXTS: Final = ("DefaultCPUAllocator", "CUDA error: out of memory")
"""torch has no exception of its own for the host's memory, plain and pinned."""


@contextmanager
def asking_for(what: str, nbytes: int = 0) -> Iterator[None]:
    """Work that takes memory. It must be this rank's own: a collective that fails leaves other
    ranks waiting, whatever the reason, so nothing is caught there.

    Args:
        what: the memory is for.
        nbytes: of it; 0: not known.

    Raises:
        OutOfMemory: in the place of whatever says that memory is not given.
    """
    try:
        yield
    except Exception as error:
        if not _is_shortage(error):
            raise
        raise OutOfMemory(what, nbytes) from error


class OneThread(ThreadPoolExecutor):
    """A thread that works on adapters: of what memory lacks for, the future says so."""

    def __init__(self, name: str) -> None:
        super().__init__(max_workers=1, thread_name_prefix=name)

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """As any executor's; the result may raise `OutOfMemory`."""

        def work() -> T:
            with asking_for("its files"):
                return fn(*args, **kwargs)

        return super().submit(work)


def _is_shortage(error: Exception) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):  # of Python and NumPy; of a GPU
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM  # of maps
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS)
