"""What ranks do beside their steps: one thread and one process group a lane.

    rank 0's loop:  a plan ─> all ranks' loops `begin` ─> each rank's thread does the work
    threads:        each says that it is done, or has no memory for it, and hears it of the others
    rank 0's loop:  `finished` ─> what it may tell the ranks to rely on

A lane does its work in the order of the plans on every rank, so collectives inside it meet. What a
rank must have memory for before a collective it asks for `together` with the others: where one is
given none, none goes on, and nobody waits in the collective.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

import torch

from tp_engine.adapters.errors import OutOfMemory
from tp_engine.ranks.comm import Comm, Lane
from tp_engine.shortage import asking_for

log = logging.getLogger(__name__)

J = TypeVar("J")
T = TypeVar("T")

_DONE: Final = -1
"""What a rank says that is not given no memory, in the place of the bytes that it wants."""


class Ended(NamedTuple):
    """A piece of work that no rank is at any more."""

    number: int
    shortage: OutOfMemory | None
    """Why it counts as not done on any rank."""


class Together(Protocol):
    """See `Background.together`."""

    def __call__(self, what: str, nbytes: int, work: Callable[[], T]) -> T: ...


class Background(Generic[J]):
    """One rank's end of a lane."""

    def __init__(self, comm: Comm, lane: Lane, work: Callable[[J], None]) -> None:
        """Begin with nothing to do; ``work`` is called in the lane's own thread. With `OutOfMemory`
        it has failed on all ranks, with anything else the service is lost."""
        self._comm = comm
        self._lane = lane
        self._work = work
        self._jobs: queue.SimpleQueue[tuple[int, J]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._number = 0
        self._agreed: OutOfMemory | None = None
        """What all ranks have heard in the midst of this piece of work."""
        self._finished: list[Ended] = []
        self._error: Exception | None = None

    def begin(self, number: int, job: J) -> None:
        """Start a piece of work; every rank must do it with the same number, in the same order."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._lane.name, daemon=True)
            self._thread.start()
        self._jobs.put((number, job))

    def finished(self) -> list[Ended]:
        """What has ended on all ranks since the last call; on ranks ≥ 1 always none.

        Raises:
            RuntimeError: a piece of this rank's work failed, as when a rank is gone.
        """
        with self._lock:
            if self._error is not None:
                reason = f"the {self._lane.name} of an adapter failed"
                raise RuntimeError(reason) from self._error
            finished, self._finished = self._finished, []
        return finished

    def together(self, what: str, nbytes: int, work: Callable[[], T]) -> T:
        """For the lane's work: what ``work``, which uses no collective, gives on this rank.

        Every rank must call it, in the same order.

        Args:
            what: the memory is for, as in `asking_for`.
            nbytes: of it.
            work: takes the memory.

        Raises:
            OutOfMemory: on all ranks, as one of them was given none.
        """
        result: list[T] = []
        wanted = _DONE
        try:
            with asking_for(what, nbytes):
                result.append(work())
        except OutOfMemory as error:
            wanted = error.nbytes
        self._agreed = self._agree(wanted)
        if self._agreed is not None:  # which is kept, and what is raised keeps the frames it passes
            mine = wanted != _DONE
            raise OutOfMemory(what, wanted) if mine else OutOfMemory(*self._agreed.needs)
        return result[0]

    def _run(self) -> None:
        if self._comm.device.type == "cuda":
            torch.cuda.set_device(self._comm.device)  # a thread begins with the first GPU
        while self._error is None:
            self._do(*self._jobs.get())  # no name here keeps a job until the next one comes

    def _do(self, number: int, job: J) -> None:
        self._number, self._agreed = number, None
        wanted = _DONE
        try:
            try:
                self._work(job)
            except OutOfMemory as error:
                log.warning("rank %d, %s: %s", self._comm.rank, self._lane.name, str(error))
                wanted = error.nbytes
            ended = Ended(number, self._agreed or self._agree(wanted))
        except Exception as error:
            # Not of an adapter's making, and ranks may have parted ways: a rank is gone, or an
            # invariant is broken. The loop hears of it and ends the service.
            with self._lock:
                self._error = error
        else:
            if self._comm.rank == 0:
                with self._lock:
                    self._finished.append(ended)

    def _agree(self, wanted: int) -> OutOfMemory | None:
        """The first rank's shortage, equal on all ranks, once all have come so far."""
        said = self._comm.gather_background(self._lane, [self._number, wanted])
        for rank, (number, nbytes) in enumerate(said):
            assert number == self._number, f"rank {rank} is at {number}, not {self._number}"
            if nbytes != _DONE:
                return OutOfMemory(f"it on rank {rank}", nbytes)
        return None
