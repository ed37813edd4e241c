"""Brings adapters up: store ─> hosts of all ranks ─> arenas of all ranks. Rank 0 decides.

    cold     in the store alone           `Fetcher` reads it, `Delivery` sends each rank its part
    warm     on the hosts                 `Copies` copies it, beside the steps
    resident in the arenas, ready         running requests may use it

Every move takes all the pages it needs or none, and is complete on all ranks or counts as not
done. The loop calls `turn` between steps; it never waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import Protocol

from tp_engine.adapters import AdapterImage
from tp_engine.adapters.errors import OutOfMemory
from tp_engine.interpreter import idle
from tp_engine.memory import AdapterFootprint, AdapterResidency, Demand, HostTier, Prices
from tp_engine.ranks.background import Ended
from tp_engine.steps.plan import PlanKind
from tp_engine.tiers.fetching import Fetch, Fetcher

WAIT_SECONDS = 0.0005
"""Between looks at what moves while nothing can run."""


class Stand(Enum):
    """How an adapter stands towards a request that is next to run."""

    READY = "ready"
    COMING = "coming"
    """On its way; the request hears of every move."""
    NO_ROOM = "no room"
    """What runs leaves no pages for it now."""


class CarryOut(Protocol):
    """How all ranks are told."""

    def __call__(
        self, kind: PlanKind, numbers: Sequence[int], images: Sequence[AdapterImage] | None = None
    ) -> None:
        """Let them do it; with DELIVER, ``images`` are one a rank."""
        ...


class Movers(Protocol):
    """What carries adapters on each rank, see `tp_engine.steps.worker.Worker`."""

    def arrived(self) -> list[Ended]:
        """Deliveries that have ended on all ranks since the last call, by handle."""
        ...

    def landed(self) -> list[Ended]:
        """Likewise copies into the arenas."""
        ...


class AdapterTiers:
    """Rank 0's; see above."""

    def __init__(
        self,
        carry_out: CarryOut,
        movers: Movers,
        demand: Demand,
        prices: Prices,
        *,
        fetch: Fetch,
        host_pages: int,
        moved: Callable[[int], None],
        failed: Callable[[AdapterFootprint, Exception], None],
    ) -> None:
        """Begin with everything cold.

        Args:
            carry_out: tells all ranks.
            movers: tell what has moved.
            demand: who wants what.
            prices: are told how long moves took.
            fetch: reads a revision, in another thread.
            host_pages: of every rank's host memory.
            moved: called with the handle of what has come to the hosts or to the arenas.
            failed: called with what could not be read, sent or copied, and why.
        """
        self._carry_out = carry_out
        self._movers = movers
        self._demand = demand
        self._prices = prices
        self._moved = moved
        self._failed = failed
        self._sending: dict[int, tuple[AdapterFootprint, float | None]] = {}
        """With the time since which it was read, if it was."""
        self._copying: dict[int, tuple[AdapterFootprint, float]] = {}
        self.host = HostTier(host_pages, demand, prices, self._cooled)
        self.fetcher = Fetcher(fetch, demand.is_wanted)
        self._prefetching: set[int] = set()
        self._not_prefetched: dict[int, Exception] = {}
        """Why, by handle, until somebody asks."""
        self.fetches = 0

    def bind(self, residency: AdapterResidency) -> None:
        """Say what the arenas hold; its books need this to know what is warm."""
        self.residency = residency

    @property
    def busy(self) -> bool:
        """Whether anything is on its way."""
        return bool(self._sending or self._copying or self.fetcher.busy)

    @property
    def copying(self) -> bool:
        """Whether an adapter is on its way to the arenas."""
        return bool(self._copying)

    @property
    def starved(self) -> bool:
        """Whether what was read finds no room on the hosts."""
        return self.fetcher.peek() is not None

    def is_moving(self, handle: int) -> bool:
        """Whether an adapter is being sent or copied, so that it cannot be forgotten yet."""
        return handle in self._sending or handle in self._copying

    def deliver(
        self,
        adapter: AdapterFootprint,
        images: Sequence[AdapterImage],
        began: float | None = None,
    ) -> bool:
        """Begin to give all hosts their images; False when what is wanted leaves no room.

        For one that comes from the store, copies of what stands in the arenas give way too,
        although requests want them: else it could wait for as long as others are asked for.

        Args:
            adapter: that neither is on the hosts nor on its way there.
            images: one a rank.
            began: when it was begun to be read, if it comes from the store.
        """
        pages = self.host.take(adapter, () if began is None else self._spared())
        if pages is None:
            return False
        self._sending[adapter.handle] = adapter, began
        self._carry_out(PlanKind.DELIVER, (adapter.handle, adapter.words, *pages), images)
        return True

    def want(self, adapter: AdapterFootprint) -> bool:
        """Have an adapter brought to the hosts if it is cold; whether it was."""
        if self.is_at_hand(adapter.handle):
            return False
        self.want_on_hosts(adapter)
        return True

    def want_on_hosts(self, adapter: AdapterFootprint) -> None:
        """Have an adapter brought to the hosts if they do not have it, resident or not."""
        if not self.host.is_warm(adapter.handle) and not self.host.is_coming(adapter.handle):
            self.fetcher.want(adapter)

    def prefetch(self, adapter: AdapterFootprint) -> Exception | None:
        """Have a cold adapter brought to the hosts although nobody waits for it; or say, once, why
        that has failed."""
        handle = adapter.handle
        failure = self._not_prefetched.pop(handle, None)
        if failure is None and handle not in self._prefetching and not self.is_at_hand(handle):
            self._prefetching.add(handle)
            self._demand.hold(handle)
            self.want(adapter)
        return failure

    def is_at_hand(self, handle: int) -> bool:
        """Whether an adapter is in the arenas or on the hosts."""
        return self.residency.is_resident(handle) or self.host.is_warm(handle)

    def bring(self, adapter: AdapterFootprint, spare: int) -> Stand:
        """Bring an adapter into the arenas if need be.

        Args:
            adapter: of a request that could run now.
            spare: arena pages to be left for others.
        """
        resident = self.residency.find(adapter.handle)
        if resident is not None:
            return Stand.READY if resident.ready else Stand.COMING
        if self.want(adapter):
            return Stand.COMING
        resident = self.residency.load(adapter, spare)
        if resident is None:
            return Stand.NO_ROOM
        self._demand.hold(adapter.handle)  # its host copy, while that is read
        self._copying[adapter.handle] = adapter, time.monotonic()
        numbers = (adapter.handle, resident.descriptor, *resident.pages)
        self._carry_out(PlanKind.COPY, numbers)
        return Stand.COMING

    def turn(self) -> None:
        """Take up what has moved since the last call, and begin what can follow.

        Raises:
            RuntimeError: a rank could not do its part, for another reason than want of memory.
        """
        for each in self._movers.arrived():
            self._arrived(*each)
        for each in self._movers.landed():
            self._landed(*each)
        self._take_fetched()

    def wait(self) -> None:
        """Sleep a moment, as nothing can run until something has moved."""
        with idle():
            time.sleep(WAIT_SECONDS)

    def forget(self, handle: int) -> None:
        """Drop an adapter that is not moving from all tiers."""
        assert not self.is_moving(handle)
        self._prefetching.discard(handle)
        self._not_prefetched.pop(handle, None)
        self.residency.forget(handle)
        if self.host.is_warm(handle):
            self.host.drop(handle)

    def _arrived(self, handle: int, shortage: OutOfMemory | None) -> None:
        adapter, read = self._sending.pop(handle)
        if shortage is not None:
            self.host.give_up(handle)
            self._fail(adapter, shortage)
            return
        if read is not None:
            self._prices.fetched(adapter.pages, time.monotonic() - read)
            self.fetches += 1
        self.host.arrived(handle)
        self._not_prefetched.pop(handle, None)
        self._end_prefetch(handle)
        self._moved(handle)

    def _landed(self, handle: int, shortage: OutOfMemory | None) -> None:
        adapter, began = self._copying.pop(handle)
        if shortage is None:
            self._prices.copied(adapter.pages, time.monotonic() - began)
            self.residency.landed(handle)
        else:
            self.residency.give_up(handle)
        self._demand.release(handle)
        if shortage is None:
            self._moved(handle)
        else:
            self._fail(adapter, shortage)

    def _fail(self, adapter: AdapterFootprint, error: Exception) -> None:
        if adapter.handle in self._prefetching:
            self._not_prefetched[adapter.handle] = error
        self._end_prefetch(adapter.handle)
        self._failed(adapter, error)

    def _take_fetched(self) -> None:
        found = self.fetcher.peek()
        if found is None:
            return
        adapter, future, began = found
        error = future.exception()
        if error is not None:
            self.fetcher.pop()
            if not isinstance(error, (ValueError, OSError)):
                raise error  # no file and no disk does that: it is a fault of this program
            if self._demand.is_wanted(adapter.handle):  # else it has gone meanwhile
                self._fail(adapter, error)
            return
        wanted = self._demand.is_wanted(adapter.handle)
        if not wanted or self.deliver(adapter, future.result(), began):
            self.fetcher.pop()

    def _spared(self) -> Iterator[int]:
        """Adapters that requests have in the arenas, and whose host copies nobody holds."""
        for resident in self.residency.residents:
            handle = resident.footprint.handle
            if resident.ready and not self._demand.is_held(handle):
                yield handle

    def _end_prefetch(self, handle: int) -> None:
        if handle in self._prefetching:
            self._prefetching.remove(handle)
            self._demand.release(handle)

    def _cooled(self, handle: int) -> None:
        self._carry_out(PlanKind.FORGET, (handle,))
        self.residency.reconsider(handle)
