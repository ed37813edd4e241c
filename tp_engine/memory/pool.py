"""Who holds each page of the arena. Rank 0 decides; page ids mean the same on all ranks.

A page is in exactly one state:

    FREE ──take──> HELD by running requests (KV, counted) or by a resident adapter
    HELD KV ──drop to 0──> CACHED (its tokens are known and may be asked for again) or FREE
    CACHED ──hit──> HELD;  CACHED / idle adapter ──evicted, least worth first──> FREE

Each release of a page raises its generation, so that a stale page set is caught when a plan is
built instead of reading another request's memory.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Collection, Sequence
from enum import IntEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tp_engine.memory.worth import Worth


class PageUse(IntEnum):
    """What a page was last written as."""

    NONE = 0
    KV = 1
    ADAPTER = 2


class PageCache(Protocol):
    """Something that keeps pages which nobody needs right now and gives them back when asked."""

    def evictable(self) -> int:
        """How many pages it could give back."""

    def cheapest(self) -> Worth | None:
        """Worth of the entry that it would give first; None when it has nothing to give."""

    def evict_cheapest(self) -> None:
        """Release the pages of that entry."""


class PagePool:
    """Free pages, reference counts and generations."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = deque(range(num_pages))
        self._references = array("q", bytes(8 * num_pages))
        self._generation = [0] * num_pages
        self._use = [PageUse.NONE] * num_pages
        self.taken_over = {PageUse.KV: 0, PageUse.ADAPTER: 0}
        """Pages that KV took after an adapter had used them, and the reverse."""
        self._caches: list[PageCache] = []

    @property
    def free(self) -> int:
        """Pages that nobody holds and nothing is cached in."""
        return len(self._free)

    def add_cache(self, cache: PageCache) -> None:
        """Let a cache lend the pages that it could give back."""
        self._caches.append(cache)

    def available(self) -> int:
        """Pages that `take` could give: free ones and those the caches would give back."""
        return len(self._free) + sum(cache.evictable() for cache in self._caches)

    def take(self, count: int, use: PageUse) -> list[int] | None:
        """All of ``count`` pages, one reference each, or None and nothing changed.

        Caches give pages back as needed, the entry of all caches that is worth least first.
        """
        if self.available() < count:
            return None
        while len(self._free) < count:
            offers = [
                (worth, i)
                for i, cache in enumerate(self._caches)
                if (worth := cache.cheapest()) is not None
            ]
            self._caches[min(offers)[1]].evict_cheapest()
        pages = [self._free.popleft() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
            if self._use[page] not in (use, PageUse.NONE):
                self.taken_over[use] += 1
            self._use[page] = use
        return pages

    def share(self, page: int) -> None:
        """One more reference to a page, cached or held."""
        self._references[page] += 1

    def drop(self, page: int) -> bool:
        """One reference less; True when that was the last (the page is not free yet)."""
        assert self._references[page] > 0, f"page {page} is not held"
        self._references[page] -= 1
        return self._references[page] == 0

    def release(self, page: int) -> None:
        """Free a page that nobody refers to; whoever still names it is found by its generation."""
        assert self._references[page] == 0, f"page {page} is still held"
        self._generation[page] += 1
        self._free.append(page)

    def generation(self, page: int) -> int:
        """How often the page has been released."""
        return self._generation[page]

    def current(self, pages: Sequence[int], generations: list[int]) -> bool:
        """Whether a page set is still what it was when it was taken."""
        # Asked for every sequence of every step, so without a Python loop over the pages.
        return list(map(self._generation.__getitem__, pages)) == generations and all(
            map(self._references.__getitem__, pages)
        )

    def check(self, held: dict[int, int], cached: set[int]) -> list[str]:
        """Compare the books with what the owners say; the faults found, none when sound.

        Args:
            held: page -> references that running requests and resident adapters say they have.
            cached: pages that the prefix cache keeps for nobody in particular.
        """
        references = np.array(self._references)
        wanted, kept = (np.zeros(self.num_pages, np.int64) for _ in range(2))
        wanted[_ints(held.keys())] = _ints(held.values())
        free = np.bincount(_ints(self._free), minlength=self.num_pages)
        kept[_ints(cached)] = 1
        states = (free > 0) + (references > 0) + ((kept > 0) & (references == 0)).astype(np.int64)
        faults = [f"page {page} stands in the free list twice" for page in np.flatnonzero(free > 1)]
        for page in np.flatnonzero(references != wanted):
            faults.append(
                f"page {page} has {references[page]} references, its owners say {wanted[page]}"
            )
        for page in np.flatnonzero(states != 1):
            faults.append(f"page {page} is {'leaked' if states[page] == 0 else 'in two states'}")
        return faults


def _ints(values: Collection[int]) -> npt.NDArray[np.int64]:
    return np.fromiter(values, np.int64, len(values))
