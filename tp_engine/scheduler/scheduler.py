"""Which requests run in the next step, and with how many rows.

Continuous batching, first come first served. Decoding requests get their row first; what is left
of the token budget goes to prompts, in chunks. An older request may take pages from a younger one
that runs, which then computes again later: so the oldest one that runs always moves.

    waiting ──its adapter is ready and pages are free──> running
    waiting ──its adapter is on its way──> parked ──it has moved──> waiting, at its old place

Who is parked lets younger ones pass, for as long as a load takes. Who lacks pages does not: then
those that run end one by one until there are enough. Who runs and lacks the pages of an adapter on
its way stays where it is until that has landed. So nothing can wait in a circle.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import chain

from tp_engine.memory import (
    AdapterResidency,
    Demand,
    PageLayout,
    PagePool,
    PageUse,
    PrefixCache,
)
from tp_engine.scheduler.request import Request, Work
from tp_engine.tiers.tiers import AdapterTiers, Stand


@dataclass(slots=True)
class SchedulerCounters:
    """Monotonic since start."""

    preemptions: int = 0
    prefix_hit_tokens: int = 0
    prefix_query_tokens: int = 0
    """Prompt tokens of admitted requests, cached or not."""
    chunked_prefills: int = 0
    """Steps in which a prompt was computed only in part."""

    def as_dict(self) -> dict[str, float]:
        """Name to value."""
        return {f.name: float(getattr(self, f.name)) for f in fields(self)}


class Scheduler:
    """The waiting and the running requests, and the pages the running ones hold."""

    def __init__(
        self,
        *,
        layout: PageLayout,
        pool: PagePool,
        prefix: PrefixCache,
        residency: AdapterResidency,
        tiers: AdapterTiers,
        demand: Demand,
        max_num_seqs: int,
        max_num_batched_tokens: int,
    ) -> None:
        self._layout = layout
        self._pool = pool
        self._prefix = prefix
        self._residency = residency
        self._tiers = tiers
        self._demand = demand
        self._max_tokens = max_num_batched_tokens
        self._free_slots = deque(range(max_num_seqs))
        self.waiting: list[Request] = []
        """Oldest first."""
        self.parked: dict[int, list[Request]] = {}
        """Those that wait for an adapter on its way, by its handle."""
        self.running: list[Request] = []
        """Oldest first."""
        self.counters = SchedulerCounters()

    @property
    def queued(self) -> Iterator[Request]:
        """All that do not run."""
        return chain(self.waiting, *self.parked.values())

    @property
    def num_parked(self) -> int:
        """Requests that wait for an adapter on its way."""
        return sum(map(len, self.parked.values()))

    def add(self, request: Request) -> None:
        """Queue a request behind all others; a cold adapter is asked for at once."""
        if request.adapter is not None and self._tiers.want(request.adapter):
            self._park(request)
        else:
            self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Take a request out, waiting or running, and free what it holds."""
        if request.slot is not None:
            self.running.remove(request)
            self._free(request)
        elif request in (parked := self._parked_with(request)):
            parked.remove(request)
            if not parked and request.adapter is not None:  # nobody may ask for it any more
                del self.parked[request.adapter.handle]
        else:
            self.waiting.remove(request)

    def unpark(self, handle: int) -> list[Request]:
        """Queue those that wait for an adapter again, as it has moved; which."""
        back = self.parked.pop(handle, [])
        for request in back:
            self._requeue(request)
        return back

    def schedule(self) -> list[Work]:
        """The work of the next step, oldest request first; empty when nothing can run.

        Rows count as computed from now on.
        """
        decodes = sum(request.remaining == 1 for request in self.running)
        budget = self._max_tokens - decodes
        work: list[Work] = []
        preempted, stays = self.counters.preemptions, False
        for request in list(self.running):
            rows = 1 if request.remaining == 1 else min(request.remaining, budget)
            if request.slot is None or rows <= 0:
                continue
            if not self._grow(request, rows):
                stays = True
                continue
            budget -= 0 if request.remaining == 1 else rows
            work.append(self._take(request, rows))
        if stays or preempted != self.counters.preemptions:
            return work  # those that run need all pages
        while self.waiting and budget > 0:
            request = self.waiting[0]
            # Preempted with tokens under way: only its old slot will know them before the host.
            if request.pending or not self._free_slots:
                break
            stand = self._bring_adapter(request)
            if stand is Stand.COMING:
                self._park(self.waiting.pop(0))
                continue
            if stand is Stand.NO_ROOM or not self._admit(request, budget):
                break
            self.waiting.pop(0)
            insort(self.running, request, key=_age)
            rows = min(request.remaining, budget)
            budget -= rows
            work.append(self._take(request, rows))
        return work

    def publish(self, request: Request) -> None:
        """Offer the request's full blocks to the prefix cache: their ids are confirmed."""
        full = min(request.computed, len(request.tokens)) // self._layout.block_tokens
        if full <= request.published:
            return
        keys = request.block_keys(full, self._layout.block_tokens)
        owner = "" if request.adapter is None else request.adapter.digest
        for block in range(request.published, full):
            self._prefix.publish(keys[block], request.pages[block], owner)
        request.published = full

    def held_pages(self) -> Counter[int]:
        """Page -> references, as the running requests and resident adapters say."""
        held: Counter[int] = Counter()
        for request in self.running:
            held.update(request.pages)
        for resident in self._residency.residents:
            held.update(resident.pages)
        return held

    def _take(self, request: Request, rows: int) -> Work:
        start = request.computed
        request.computed += rows
        samples = request.computed == len(request.tokens) + request.pending
        if samples:
            request.pending += 1
        else:
            self.counters.chunked_prefills += 1
        return Work(request, start, rows, samples)

    def _grow(self, request: Request, rows: int) -> bool:
        """Get the pages for the next rows, from younger requests if need be, unless pages of an
        adapter on its way to the arena will do: that goes again, if it must, once it has landed."""
        missing = self._layout.blocks(request.computed + rows) - len(request.pages)
        while missing > 0 and not self._add_pages(request, missing):
            youngest = self.running[-1]
            if youngest is request and self._tiers.copying:
                return False
            self._preempt(youngest)
            if youngest is request:
                return False
        return True

    def _add_pages(self, request: Request, count: int) -> bool:
        pages = self._pool.take(count, PageUse.KV)
        if pages is None:
            return False
        request.pages += pages
        request.generations += [self._pool.generation(page) for page in pages]
        return True

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._free(request)
        self._requeue(request)
        self.counters.preemptions += 1

    def _park(self, request: Request) -> None:
        assert request.adapter is not None
        self.parked.setdefault(request.adapter.handle, []).append(request)

    def _parked_with(self, request: Request) -> list[Request]:
        return [] if request.adapter is None else self.parked.get(request.adapter.handle, [])

    def _requeue(self, request: Request) -> None:
        insort(self.waiting, request, key=_age)

    def _bring_adapter(self, request: Request) -> Stand:
        """See that its adapter is in the arena, or on its way there."""
        if request.adapter is None:
            return Stand.READY
        return self._tiers.bring(request.adapter, spare=len(self.running))

    def _admit(self, request: Request, budget: int) -> bool:
        """Give a waiting request its slot, adapter, cached prefix and first pages; or nothing."""
        if request.adapter is not None:
            request.resident = self._residency.acquire(request.adapter)
            assert request.resident is not None, "it has just been seen to be ready"
        block = self._layout.block_tokens
        # At least one token is left to compute.
        keys = request.block_keys((len(request.tokens) - 1) // block, block)
        cached = self._prefix.find(keys)
        rows = min(request.remaining - len(cached) * block, budget)
        missing = self._layout.blocks(len(cached) * block + rows) - len(cached)
        # The running ones will grow next; taking their last pages would only preempt them.
        spare = self._prefix.idle_among(cached) + len(self.running)
        if self._pool.available() < missing + spare:
            self._free(request)
            return False
        self._begin(request, keys)
        found = self._add_pages(request, missing)
        assert found, "taking what is cached makes no other page unavailable"
        return True

    def _begin(self, request: Request, keys: Sequence[bytes]) -> None:
        """Give a request a slot and what is cached of its blocks."""
        request.pages = self._prefix.match(keys)
        request.generations = [self._pool.generation(page) for page in request.pages]
        request.published = len(request.pages)
        request.computed = len(request.pages) * self._layout.block_tokens
        request.slot = self._free_slots.popleft()
        request.slot_is_new = True
        self._count_admission(request)

    def _count_admission(self, request: Request) -> None:
        self.counters.prefix_query_tokens += len(request.tokens)
        self.counters.prefix_hit_tokens += request.computed
        if not request.admitted:
            request.admitted = True
            if request.adapter is not None:
                self._demand.use(request.adapter.handle)
            request.cached_tokens = request.computed

    def _free(self, request: Request) -> None:
        self._prefix.give_back(request.pages)
        request.pages, request.generations = [], []
        request.computed = request.published = request.pages_told = 0
        if request.resident is not None:
            self._residency.give_back(request.resident)
            request.resident = None
        if request.slot is not None:
            self._free_slots.append(request.slot)
            request.slot = None
        request.slot_has_last = False


def _age(request: Request) -> int:
    return request.number
