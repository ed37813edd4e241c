"""Fetching what operators name, each source in a thread of its own.

A source that is slow or broken holds nothing but its own thread; at most `AT_ONCE` adapters of one
bucket, host or organisation are fetched at a time, so that others find room.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final, TypeVar

from tp_engine.sources import (
    AllowedSources,
    Claim,
    FetchArea,
    FetchCancelled,
    FetchLimits,
    FetchProgress,
    SourceError,
    SourceUrl,
    fetch,
    open_source,
)

AT_ONCE: Final = 4

T = TypeVar("T")


class RemoteSources:
    """What may be fetched, and where to."""

    def __init__(self, allowed: AllowedSources, area: FetchArea, limits: FetchLimits) -> None:
        self.allowed = allowed
        self.area = area
        self.limits = limits
        self._sites: dict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(AT_ONCE))

    async def fetch(
        self, url: SourceUrl, sums: Mapping[str, str], progress: FetchProgress
    ) -> Claim:
        """Fetch an allowed address; the caller gives the claim up.

        When this is cancelled, the thread ends a little later, and what it has fetched is kept.

        Raises:
            SourceError: see `tp_engine.sources.fetch`.
            OSError: the disk is full or broken.
        """
        async with self._sites[url.site]:
            work = in_thread(partial(self._fetch, url, sums, progress))
            try:
                return await asyncio.shield(work)
            except asyncio.CancelledError:
                progress.cancelled.set()
                work.add_done_callback(_give_up)
                raise

    def _fetch(self, url: SourceUrl, sums: Mapping[str, str], progress: FetchProgress) -> Claim:
        source = open_source(url, self.allowed)
        claim = self.area.claim(str(url))
        try:
            fetch(source, claim, self.limits, progress, sums)
        except BaseException as error:
            broken = isinstance(error, SourceError) and error.code == "source_failed"
            claim.release(keep=broken or isinstance(error, FetchCancelled))
            raise
        finally:
            source.close()
        return claim


def in_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """Call ``work`` in a thread that does not keep the process alive."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, failure = None, None
        try:
            result = work()
        except BaseException as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, name="adapter-fetch", daemon=True).start()
    return future


def _give_up(work: asyncio.Future[Claim]) -> None:
    if work.exception() is None:
        work.result().release(keep=True)
