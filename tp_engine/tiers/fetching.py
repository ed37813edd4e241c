"""Reads adapters back from the store, one at a time, in a thread of rank 0."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from tp_engine.adapters import AdapterImage
from tp_engine.memory import AdapterFootprint
from tp_engine.shortage import OneThread

Fetch = Callable[[str], Sequence[AdapterImage]]
"""Reads, checks, cuts and packs the revision of a digest: its images, one a rank. A ValueError or
OSError says why that cannot be done."""
Fetched = Future[Sequence[AdapterImage]]


class Fetcher:
    """A queue of adapters that are wanted. One at a time: the engine's steps need the host's
    cores more than a read does."""

    def __init__(self, fetch: Fetch, is_wanted: Callable[[int], bool]) -> None:
        """Begin with none.

        Args:
            fetch: called in the other thread.
            is_wanted: whether an adapter that was asked for, by handle, still is.
        """
        self.fetch = fetch
        self._is_wanted = is_wanted
        self._reader = OneThread("adapter-fetcher")
        self._waiting: dict[int, AdapterFootprint] = {}
        self._reading: tuple[AdapterFootprint, Fetched, float] | None = None

    def is_on_it(self, handle: int) -> bool:
        """Whether an adapter is being read, or waits to be."""
        reading = self._reading is not None and self._reading[0].handle == handle
        return reading or handle in self._waiting

    @property
    def busy(self) -> bool:
        """Whether there is anything to wait for."""
        return self._reading is not None or bool(self._waiting)

    def want(self, adapter: AdapterFootprint) -> None:
        """Read an adapter after those that were wanted before it."""
        if not self.is_on_it(adapter.handle):
            self._waiting[adapter.handle] = adapter
            self._begin()

    def peek(self) -> tuple[AdapterFootprint, Fetched, float] | None:
        """What has been read or failed to be, and when that began, until it is taken by `pop`."""
        if self._reading is not None and self._reading[1].done():
            return self._reading
        return None

    def pop(self) -> None:
        """Go on with the next."""
        assert self.peek() is not None
        self._reading = None
        self._begin()

    def _begin(self) -> None:
        while self._reading is None and self._waiting:
            adapter = self._waiting.pop(next(iter(self._waiting)))
            if self._is_wanted(adapter.handle):
                future = self._reader.submit(self.fetch, adapter.digest)
                self._reading = adapter, future, time.monotonic()
