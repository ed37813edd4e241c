"""Which adapters the hosts have, and in which pages of their memory. Rank 0 decides.

    COLD ──take: all its pages, or nothing──> COMING ──arrived on all ranks──> WARM
                                              COMING ──some rank has no memory──> COLD
    WARM ──its pages are needed; least worth first; what is wanted only if it is resident──> COLD

Pages have the size of the arena's and the same numbers on every rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tp_engine.memory.demand import Demand
from tp_engine.memory.prices import Prices
from tp_engine.memory.residency import AdapterFootprint
from tp_engine.memory.worth import Candidates, log_worth


@dataclass(slots=True)
class _Copy:
    footprint: AdapterFootprint
    pages: list[int]
    arrived: bool = False


class HostTier:
    """The books of the hosts' pages."""

    def __init__(
        self,
        num_pages: int,
        demand: Demand,
        prices: Prices,
        evicted: Callable[[int], None],
    ) -> None:
        """Start empty.

        Args:
            num_pages: of every rank's host memory.
            demand: what is wanted stays.
            prices: of bringing a copy back.
            evicted: called with the handle of a copy that has just gone.
        """
        self.num_pages = num_pages
        self._demand = demand
        self._prices = prices
        self._evicted = evicted
        self._free = deque(range(num_pages))
        self._copies: dict[int, _Copy] = {}
        self._idle: Candidates[int] = Candidates()
        self._evictable = 0
        self.evictions = 0
        demand.watch(self._reconsider)

    @property
    def free(self) -> int:
        """Pages that hold no copy."""
        return len(self._free)

    @property
    def warm(self) -> int:
        """Adapters whose copies have arrived."""
        return sum(copy.arrived for copy in self._copies.values())

    def is_warm(self, handle: int) -> bool:
        """Whether all hosts have the adapter."""
        copy = self._copies.get(handle)
        return copy is not None and copy.arrived

    def is_coming(self, handle: int) -> bool:
        """Whether the adapter is on its way to the hosts."""
        copy = self._copies.get(handle)
        return copy is not None and not copy.arrived

    def take(self, footprint: AdapterFootprint, also: Iterable[int] = ()) -> list[int] | None:
        """Pages for the copy of a cold adapter; None when what is wanted leaves too few.

        Args:
            footprint: of the adapter.
            also: handles of adapters whose copies go, the first ones first, when those that nobody
                wants are not enough.
        """
        assert footprint.handle not in self._copies
        more = [handle for handle in also if self.is_warm(handle) and handle not in self._idle]
        room = len(self._free) + self._evictable
        if room + sum(len(self._copies[handle].pages) for handle in more) < footprint.pages:
            return None
        while len(self._free) < footprint.pages:
            found = self._idle.cheapest()
            self.drop(more.pop(0) if found is None else found[1])
            self.evictions += 1
        pages = [self._free.popleft() for _ in range(footprint.pages)]
        self._copies[footprint.handle] = _Copy(footprint, pages)
        return pages

    def arrived(self, handle: int) -> None:
        """All hosts have the copy."""
        self._copies[handle].arrived = True
        self._reconsider(handle)

    def give_up(self, handle: int) -> None:
        """Free the pages of a copy that will not arrive; a host may have got it all the same."""
        copy = self._copies.pop(handle)
        assert not copy.arrived
        self._free.extend(copy.pages)
        self._evicted(handle)

    def drop(self, handle: int) -> None:
        """Free the pages of a copy that has arrived."""
        copy = self._copies.pop(handle)
        assert copy.arrived
        if handle in self._idle:
            self._idle.discard(handle)
            self._evictable -= len(copy.pages)
        self._free.extend(copy.pages)
        self._evicted(handle)

    def check(self) -> list[str]:
        """Faults in the books; none when they are sound."""
        held = sorted([*self._free, *(p for copy in self._copies.values() for p in copy.pages)])
        faults = [] if held == list(range(self.num_pages)) else ["host pages are lost or shared"]
        idle = sum(len(self._copies[handle].pages) for handle in self._idle)
        if idle != self._evictable:
            faults.append(f"{idle} host pages are idle, the books say {self._evictable}")
        wanted = [handle for handle in self._idle if self._demand.is_wanted(handle)]
        return faults + [f"adapter {handle} may go although it is wanted" for handle in wanted]

    def _reconsider(self, handle: int) -> None:
        copy = self._copies.get(handle)
        if copy is None or not copy.arrived:
            return
        pages = len(copy.pages)
        if handle in self._idle:
            self._idle.discard(handle)
            self._evictable -= pages
        if not self._demand.is_wanted(handle):
            weight = self._demand.weight(handle)
            self._idle.put(handle, (False, log_worth(weight, self._prices.cold_load(pages), pages)))
            self._evictable += pages
