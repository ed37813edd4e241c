"""Everything that rank 0 keeps account of: pages, adapters, requests."""

from __future__ import annotations

import time
from collections.abc import Callable

from tp_engine.adapters.errors import OutOfMemory
from tp_engine.memory import (
    AdapterFootprint,
    AdapterResidency,
    Demand,
    PageLayout,
    PagePool,
    PrefixCache,
    Prices,
)
from tp_engine.requests.admission import EngineLimits
from tp_engine.roster import AdapterRoster
from tp_engine.scheduler import Scheduler
from tp_engine.tiers.fetching import Fetch
from tp_engine.tiers.tiers import AdapterTiers, CarryOut, Movers


class Books:
    """The parts, made for each other; they begin empty."""

    def __init__(
        self,
        limits: EngineLimits,
        layout: PageLayout,
        carry_out: CarryOut,
        movers: Movers,
        *,
        fetch: Fetch,
        failed: Callable[[AdapterFootprint, Exception], None],
        beat: Callable[[], None],
    ) -> None:
        """Open them.

        Args:
            limits: sizes.
            layout: of a page.
            carry_out: tells all ranks about adapters.
            movers: tell which adapters have moved.
            fetch: reads a revision back that the hosts do not have, in another thread.
            failed: called with an adapter that could not be brought up, and why.
            beat: see `AdapterRoster`.
        """
        clock = time.monotonic
        self._tell_failed = failed
        self.pool = PagePool(limits.num_pages)
        self.prices = Prices(layout.page_bytes, layout.block_tokens)
        self.demand = Demand(clock)
        self.prefix = PrefixCache(self.pool, self.prices, clock, enabled=limits.prefix_caching)
        self.tiers = AdapterTiers(
            carry_out,
            movers,
            self.demand,
            self.prices,
            fetch=fetch,
            host_pages=limits.host_pages,
            moved=self._moved,
            failed=self._failed,
        )
        self.residency = AdapterResidency(
            self.pool,
            self.demand,
            self.prices,
            descriptor_words=limits.descriptor_words,
            idle_pages=limits.idle_adapter_pages,
            is_warm=self.tiers.host.is_warm,
        )
        self.tiers.bind(self.residency)
        self.roster = AdapterRoster(self.tiers, self.demand, limits, beat)
        self.scheduler = Scheduler(
            layout=layout,
            pool=self.pool,
            prefix=self.prefix,
            residency=self.residency,
            tiers=self.tiers,
            demand=self.demand,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
        )

    def check(self) -> list[str]:
        """Faults; none when all is sound."""
        held = self.scheduler.held_pages()
        return self.pool.check(held, self.prefix.idle_pages) + self.tiers.host.check()

    def _failed(self, adapter: AdapterFootprint, error: Exception) -> None:
        if isinstance(error, OutOfMemory):
            self.roster.failed(adapter.handle, error)
        self._tell_failed(adapter, error)

    def _moved(self, handle: int) -> None:
        self.roster.moved(handle)
        self.scheduler.unpark(handle)
