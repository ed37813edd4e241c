"""Adapters on their way from rank 0 to all ranks, beside the steps and never in them.

    rank 0's loop:   DELIVER plan ─> all ranks' loops ─> their delivery threads
    delivery threads: scatter of the page images, then each says that it has its own
    rank 0's loop:   `arrived` ─> REGISTER plan ─> all ranks `take` theirs

Each rank has one thread and a process group of its own for this, so deliveries are carried out in
the order of the plans on every rank. At world size 1 there is nothing to send.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence

import torch

from tp_engine.adapters import AdapterImage
from tp_engine.comm import Comm

Job = tuple[int, int, int, Sequence[AdapterImage] | None]


class Delivery:
    """One rank's end."""

    def __init__(self, comm: Comm, page_bytes: int) -> None:
        self._comm = comm
        self._page_bytes = page_bytes
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._images: dict[int, AdapterImage] = {}
        self._arrived: list[int] = []
        self._error: Exception | None = None

    def begin(
        self, handle: int, pages: int, words: int, images: Sequence[AdapterImage] | None
    ) -> None:
        """Start a delivery; every rank must do it with the same numbers and in the same order.

        Args:
            handle: the adapter's number.
            pages: of each rank's image.
            words: of each rank's record.
            images: on rank 0 one a rank, None elsewhere.
        """
        job = (handle, pages, words, images)
        if self._comm.world == 1:
            self._carry_out(job)
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="delivery", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def arrived(self) -> list[int]:
        """Rank 0: handles of what all ranks have had since the last call.

        Raises:
            RuntimeError: a delivery failed, as when a rank is gone.
        """
        with self._lock:
            if self._error is not None:
                raise RuntimeError("an adapter could not be given to all ranks") from self._error
            arrived, self._arrived = self._arrived, []
        return arrived

    def take(self, handle: int) -> AdapterImage:
        """This rank's part of an adapter that has arrived on all ranks."""
        with self._lock:
            return self._images.pop(handle)

    def _run(self) -> None:
        if self._comm.device.type == "cuda":
            torch.cuda.set_device(self._comm.device)  # a thread begins with the first GPU
        while self._error is None:
            job = self._jobs.get()
            try:
                self._carry_out(job)
            except Exception as error:
                with self._lock:
                    self._error = error

    def _carry_out(self, job: Job) -> None:
        handle, pages, words, images = job
        image = AdapterImage(
            pages=self._comm.scatter_background(
                None if images is None else [image.pages for image in images],
                (pages, self._page_bytes),
                torch.uint8,
            ),
            record=self._comm.scatter_background(
                None if images is None else [image.record for image in images],
                (words,),
                torch.int64,
            ),
        )
        if self._comm.device.type == "cuda":  # copies from pinned memory need no waiting
            image = AdapterImage(pages=image.pages.pin_memory(), record=image.record)
        with self._lock:
            self._images[handle] = image
        self._comm.gather_background(handle)
        if self._comm.rank == 0:
            with self._lock:
                self._arrived.append(handle)
