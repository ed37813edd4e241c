"""What ranks do beside their steps: one thread and one process group a lane.

    rank 0's loop:  a plan ─> all ranks' loops `begin` ─> each rank's thread does the work
    threads:        each says that it is done; rank 0's waits for all
    rank 0's loop:  `finished` ─> what it may tell the ranks to rely on

A lane does its work in the order of the plans on every rank, so collectives inside it meet.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

from tp_engine.comm import Comm, Lane

J = TypeVar("J")


class Background(Generic[J]):
    """One rank's end of a lane."""

    def __init__(self, comm: Comm, lane: Lane, work: Callable[[J], None]) -> None:
        """Begin with nothing to do; ``work`` is called in the lane's own thread."""
        self._comm = comm
        self._lane = lane
        self._work = work
        self._jobs: queue.SimpleQueue[tuple[int, J]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._finished: list[int] = []
        self._error: Exception | None = None

    def begin(self, number: int, job: J) -> None:
        """Start a piece of work; every rank must do it with the same number, in the same order."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._lane.name, daemon=True)
            self._thread.start()
        self._jobs.put((number, job))

    def finished(self) -> list[int]:
        """Numbers of what all ranks have done since the last call; on ranks ≥ 1 always none.

        Raises:
            RuntimeError: a piece of this rank's work failed, as when a rank is gone.
        """
        with self._lock:
            if self._error is not None:
                reason = f"the {self._lane.name} of an adapter failed"
                raise RuntimeError(reason) from self._error
            finished, self._finished = self._finished, []
        return finished

    def _run(self) -> None:
        if self._comm.device.type == "cuda":
            torch.cuda.set_device(self._comm.device)  # a thread begins with the first GPU
        while self._error is None:
            self._do(*self._jobs.get())  # no name here keeps a job until the next one comes

    def _do(self, number: int, job: J) -> None:
        try:
            self._work(job)
            self._comm.gather_background(self._lane, number)
        except Exception as error:
            with self._lock:
                self._error = error
        else:
            if self._comm.rank == 0:
                with self._lock:
                    self._finished.append(number)
