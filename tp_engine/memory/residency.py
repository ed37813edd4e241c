"""Which adapters stand in the arena, and where. Rank 0 decides; ranks copy on its word.

    ABSENT ──load: all its pages and its stretch of descriptors, or nothing──> COMING
    COMING ──landed: the copy is complete on all ranks──> READY
    COMING ──some rank has no memory for the copy──> ABSENT
    READY ──acquire / give_back──> in use by running requests, or idle
    idle ──its pages are needed, or too many are idle; least worth first──> ABSENT

What waiting requests want is not kept from running ones, who might need its pages to go on, but
goes last of all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tp_engine.memory.demand import Demand
from tp_engine.memory.descriptors import DescriptorSpace
from tp_engine.memory.pool import PagePool, PageUse
from tp_engine.memory.prices import Prices
from tp_engine.memory.worth import Candidates, Worth, log_worth


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterFootprint:
    """What an adapter needs, equal on all ranks."""

    handle: int
    """Its number on every rank; never used again for another adapter."""
    digest: str
    name: str
    """For people; several names may lead to the same adapter."""
    pages: int
    words: int
    """Length of its descriptor record."""
    max_rank: int
    traits: int = 0
    """Bits of `tp_engine.adapters.AdapterTraits`."""
    row_bytes: int = 0
    """Of its rank-rows, on the rank that has the most; the rest of its pages is waste."""


@dataclass(slots=True)
class Resident:
    """An adapter in the arena."""

    footprint: AdapterFootprint
    descriptor: int
    """Where its record begins in the descriptor tensor."""
    pages: list[int]
    generations: list[int]
    ready: bool = False
    """Whether its copy is complete on all ranks; till then it may neither be used nor go."""
    users: int = 0
    """Running requests; above 0 it is pinned."""


class AdapterResidency:
    """The adapters in the arena."""

    def __init__(
        self,
        pool: PagePool,
        demand: Demand,
        prices: Prices,
        *,
        descriptor_words: int,
        idle_pages: int,
        is_warm: Callable[[int], bool],
    ) -> None:
        """Start empty.

        Args:
            descriptor_words: size of the ranks' descriptor tensors.
            idle_pages: most pages that adapters which nobody wants may keep.
            is_warm: whether the hosts have the adapter of a handle.
        """
        self._pool = pool
        self._demand = demand
        self._prices = prices
        self._space = DescriptorSpace(descriptor_words)
        self._idle_pages = idle_pages
        self._is_warm = is_warm
        self._residents: dict[int, Resident] = {}
        self._idle: Candidates[int] = Candidates()
        self._evictable = 0
        self.loads = 0
        self.evictions = 0
        demand.watch(self.reconsider)
        pool.add_cache(self)

    @property
    def residents(self) -> list[Resident]:
        """All, also those on their way, in the order of their loads."""
        return list(self._residents.values())

    def find(self, handle: int) -> Resident | None:
        """The adapter in the arena or on its way there."""
        return self._residents.get(handle)

    def is_resident(self, handle: int) -> bool:
        """Whether the adapter stands in the arena, ready to be used."""
        resident = self._residents.get(handle)
        return resident is not None and resident.ready

    def load(self, footprint: AdapterFootprint, spare: int = 0) -> Resident | None:
        """Take what an absent adapter needs; None when pages or descriptor words lack.

        Args:
            footprint: of the adapter.
            spare: pages that must be left for others.
        """
        assert footprint.handle not in self._residents
        if self._pool.available() < footprint.pages + spare:
            return None
        while (descriptor := self._space.take(footprint.words)) is None:
            if self.cheapest() is None:
                return None
            self.evict_cheapest()
        pages = self._pool.take(footprint.pages, PageUse.ADAPTER)
        assert pages is not None, "evicting idle adapters makes no page unavailable"
        generations = [self._pool.generation(page) for page in pages]
        resident = Resident(footprint, descriptor, pages, generations)
        self._residents[footprint.handle] = resident
        self.loads += 1
        return resident

    def landed(self, handle: int) -> None:
        """An adapter's copy is complete on all ranks."""
        self._residents[handle].ready = True
        self._make_idle(self._residents[handle])

    def give_up(self, handle: int) -> None:
        """Take an adapter whose copy will not be complete out of the arena."""
        assert not self._residents[handle].ready
        self._remove(self._residents[handle])

    def acquire(self, footprint: AdapterFootprint) -> Resident | None:
        """Pin an adapter that is ready; None for any other."""
        resident = self._residents.get(footprint.handle)
        if resident is None or not resident.ready:
            return None
        if resident.users == 0:
            self._idle.discard(footprint.handle)
            self._evictable -= footprint.pages
        resident.users += 1
        return resident

    def give_back(self, resident: Resident) -> None:
        """One user less; the adapter stays until its pages are needed or too many are idle."""
        assert resident.users > 0
        resident.users -= 1
        if resident.users == 0:
            self._make_idle(resident)

    def evictable(self) -> int:
        """Pages of adapters that are ready and that no running request uses."""
        return self._evictable

    def cheapest(self) -> Worth | None:
        """Worth of the idle adapter that would go first."""
        found = self._idle.cheapest()
        return None if found is None else found[0]

    def evict_cheapest(self) -> None:
        """Take that adapter out of the arena."""
        found = self._idle.cheapest()
        assert found is not None
        self._evict(self._residents[found[1]])
        self.evictions += 1

    def forget(self, handle: int) -> None:
        """Take an adapter that is idle out of the arena if it stands there."""
        resident = self._residents.get(handle)
        if resident is not None:
            assert resident.ready and resident.users == 0
            self._evict(resident)

    def reconsider(self, handle: int) -> None:
        """See what an adapter is worth now that others want it, or its host copy has gone."""
        if handle in self._idle:
            self._idle.put(handle, self._worth(self._residents[handle].footprint))
            self._trim()

    def _make_idle(self, resident: Resident) -> None:
        self._idle.put(resident.footprint.handle, self._worth(resident.footprint))
        self._evictable += len(resident.pages)
        self._trim()

    def _trim(self) -> None:
        """Keep what nobody wants within its share."""
        if self._evictable <= self._idle_pages:
            return
        wanted = sum(
            len(self._residents[handle].pages)
            for handle in self._idle
            if self._demand.is_wanted(handle)
        )
        while self._evictable - wanted > self._idle_pages:
            self.evict_cheapest()

    def _worth(self, footprint: AdapterFootprint) -> Worth:
        handle, pages = footprint.handle, footprint.pages
        seconds = self._prices.warm_load(pages)
        if not self._is_warm(handle):
            seconds += self._prices.cold_load(pages)
        weight = self._demand.weight(handle)
        return self._demand.is_wanted(handle), log_worth(weight, seconds, pages)

    def _evict(self, resident: Resident) -> None:
        self._idle.discard(resident.footprint.handle)
        self._evictable -= len(resident.pages)
        self._remove(resident)

    def _remove(self, resident: Resident) -> None:
        del self._residents[resident.footprint.handle]
        self._space.give_back(resident.descriptor, resident.footprint.words)
        for page in resident.pages:
            self._pool.drop(page)
            self._pool.release(page)
