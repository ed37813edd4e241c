"""Which adapters stand in the arena, and where. Rank 0 decides; ranks copy on its word.

An adapter's page images wait on the host of every rank under a *handle*. Making it resident takes
all its pages and its stretch of the descriptor tensor, or nothing. While a running request uses
it, it is pinned; idle ones go when their pages are needed, least recently used first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from tp_engine.memory.pool import PagePool, PageUse


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterFootprint:
    """What an adapter needs, equal on all ranks."""

    handle: int
    """Number of its page images on every rank; never used again for another adapter."""
    digest: str
    name: str
    """For people; several names may lead to the same adapter."""
    pages: int
    words: int
    """Length of its descriptor record."""
    max_rank: int
    traits: int = 0
    """Bits of `tp_engine.adapters.AdapterTraits`."""


@dataclass(slots=True)
class Resident:
    """An adapter in the arena."""

    footprint: AdapterFootprint
    descriptor: int
    """Where its record begins in the descriptor tensor."""
    pages: list[int]
    generations: list[int]
    users: int = 0
    """Running requests; above 0 it is pinned."""


class DescriptorSpace:
    """First-fit allocation of stretches of the descriptor tensor."""

    def __init__(self, words: int) -> None:
        self._gaps = [(0, words)]

    def take(self, words: int) -> int | None:
        """The start of a free stretch, or None."""
        for i, (start, end) in enumerate(self._gaps):
            if end - start >= words:
                self._gaps[i : i + 1] = [(start + words, end)] if end - start > words else []
                return start
        return None

    def give_back(self, start: int, words: int) -> None:
        """Free a stretch and join it with its neighbours."""
        merged: list[tuple[int, int]] = []
        for gap in sorted([*self._gaps, (start, start + words)]):
            if merged and merged[-1][1] == gap[0]:
                merged[-1] = (merged[-1][0], gap[1])
            else:
                merged.append(gap)
        self._gaps = merged


class AdapterResidency:
    """The adapters in the arena, least recently used first."""

    def __init__(
        self, pool: PagePool, descriptor_words: int, idle_pages: int, clock: Callable[[], int]
    ) -> None:
        """Start empty.

        Args:
            descriptor_words: size of the ranks' descriptor tensors.
            idle_pages: most pages that adapters without a running request may keep.
            clock: gives a larger number with each call, shared with the other caches.
        """
        self._pool = pool
        self._space = DescriptorSpace(descriptor_words)
        self.descriptor_words = descriptor_words
        self._idle_pages = idle_pages
        self._clock = clock
        self._residents: OrderedDict[int, Resident] = OrderedDict()
        self._used: dict[int, int] = {}
        self._unpublished: list[Resident] = []
        self.loads = 0
        self.evictions = 0
        pool.add_cache(self)

    def __len__(self) -> int:
        return len(self._residents)

    @property
    def residents(self) -> list[Resident]:
        """All, least recently used first."""
        return list(self._residents.values())

    def is_resident(self, handle: int) -> bool:
        """Whether the adapter stands in the arena."""
        return handle in self._residents

    def acquire(self, footprint: AdapterFootprint) -> Resident | None:
        """Pin the adapter, loading it if needed; None when pages or descriptor words lack."""
        resident = self._residents.get(footprint.handle) or self._load(footprint)
        if resident is not None:
            resident.users += 1
            self._touch(footprint.handle)
        return resident

    def give_back(self, resident: Resident) -> None:
        """One user less; the adapter stays until its pages are needed or too many are idle."""
        assert resident.users > 0
        resident.users -= 1
        self._touch(resident.footprint.handle)
        while self.evictable() > self._idle_pages:
            self.evict_oldest()

    def take_unpublished(self) -> list[Resident]:
        """Adapters made resident since the last call: the next plan must publish them."""
        fresh, self._unpublished = self._unpublished, []
        return fresh

    def _touch(self, handle: int) -> None:
        self._residents.move_to_end(handle)
        self._used[handle] = self._clock()

    def evictable(self) -> int:
        """Pages of adapters that no running request uses."""
        return sum(len(r.pages) for r in self._residents.values() if r.users == 0)

    def oldest_use(self) -> int | None:
        """Last use of the least recently used idle adapter."""
        idle = self._oldest_idle()
        return None if idle is None else self._used[idle.footprint.handle]

    def evict_oldest(self) -> None:
        """Take the least recently used idle adapter out of the arena."""
        resident = self._oldest_idle()
        assert resident is not None
        self._evict(resident)
        self.evictions += 1

    def forget(self, handle: int) -> None:
        """Take an adapter that no running request uses out of the arena if it stands there."""
        resident = self._residents.get(handle)
        if resident is not None:
            assert resident.users == 0
            self._evict(resident)

    def _evict(self, resident: Resident) -> None:
        handle = resident.footprint.handle
        del self._residents[handle], self._used[handle]
        if resident in self._unpublished:
            self._unpublished.remove(resident)
        self._space.give_back(resident.descriptor, resident.footprint.words)
        for page in resident.pages:
            self._pool.drop(page)
            self._pool.release(page)

    def _oldest_idle(self) -> Resident | None:
        return next((r for r in self._residents.values() if r.users == 0), None)

    def _load(self, footprint: AdapterFootprint) -> Resident | None:
        if self._pool.available() < footprint.pages:
            return None
        while (descriptor := self._space.take(footprint.words)) is None:
            if self._oldest_idle() is None:
                return None
            self.evict_oldest()
        pages = self._pool.take(footprint.pages, PageUse.ADAPTER)
        assert pages is not None, "evicting idle adapters makes no page unavailable"
        generations = [self._pool.generation(page) for page in pages]
        resident = Resident(footprint, descriptor, pages, generations)
        self._residents[footprint.handle] = resident
        self._unpublished.append(resident)
        self.loads += 1
        return resident
