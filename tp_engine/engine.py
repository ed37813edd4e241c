"""The engine on rank 0: takes requests, makes plans, runs them on all ranks, gives tokens back."""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

from tp_engine.adapters import AdapterImage
from tp_engine.books import Books
from tp_engine.memory import AdapterFootprint, PageLayout, root_key
from tp_engine.messages import Failed, Output, Stats, Submit, TokenLogprobs
from tp_engine.requests.admission import (
    EngineLimits,
    RequestError,
    check_request,
    check_wait,
    longest_context,
    token_limit,
)
from tp_engine.requests.outputs import not_brought, not_finite, token_output
from tp_engine.requests.seeds import seed_source
from tp_engine.sampling import Sampled
from tp_engine.scheduler import Planner, Request, Work
from tp_engine.stats import collect_stats
from tp_engine.steps.plan import PlanKind, StepPlan
from tp_engine.steps.worker import Worker
from tp_engine.tiers.fetching import Fetch

SILENCE_SECONDS = 0.25
"""After which the other ranks hear that rank 0 lives, although there is nothing to do."""

log = logging.getLogger(__name__)


class Engine:
    """Everything rank 0 decides. `step` is one turn: plan, run, hand out tokens."""

    def __init__(
        self,
        worker: Worker,
        limits: EngineLimits,
        *,
        fetch: Fetch,
        seed: int | None,
        depth: int,
    ) -> None:
        """Begin with an empty arena.

        Args:
            worker: this rank's, which is first to carry out what it decides.
            limits: sizes.
            fetch: reads a revision back that the hosts do not have, in another thread.
            seed: of the seeds for requests that bring none; None draws them.
            depth: steps that may be under way at a time: with 2, a plan is made while the step
                before it runs.
        """
        self._depth = depth
        self._under_way: deque[tuple[list[Work], Sampled, float]] = deque()
        """With the time at which each step was begun."""
        self.worker = worker
        self.limits = limits
        self.layout: PageLayout = worker.runner.arena.layout
        books = Books(
            limits,
            self.layout,
            self._carry_out,
            worker,
            fetch=fetch,
            failed=self._not_brought,
            beat=self._beat,
        )
        self.books, self.pool, self.prefix = books, books.pool, books.prefix
        self.tiers, self.residency, self.roster = books.tiers, books.residency, books.roster
        self.scheduler = books.scheduler
        self._planner = Planner(self.pool, limits.eos_ids)
        self._requests: dict[str, Request] = {}
        self._numbers = itertools.count()
        self._unserved: list[tuple[Request, Exception]] = []
        """Requests whose adapter cannot be read; they are open until `step` has said so."""
        self._seeds = seed_source(seed)
        self._sent = 0.0
        """When the last plan was."""
        names = "steps prompt_tokens generation_tokens requests finished aborted failed"
        self.counters = dict.fromkeys([*names.split(), "steps_with_4_revisions"], 0.0)

    @property
    def requests(self) -> Mapping[str, Request]:
        """All requests that have not ended, by id."""
        return self._requests

    @property
    def adapters(self) -> Mapping[str, AdapterFootprint]:
        """The revisions that requests may use, by digest."""
        return self.roster.adapters

    # --- adapters ----------------------------------------------------------------------------

    def users_of(self, digest: str) -> list[str]:
        """Ids of the open requests of a revision."""
        return [
            request.id
            for request in self._requests.values()
            if request.adapter is not None and request.adapter.digest == digest
        ]

    def unregister(self, digest: str) -> None:
        """Forget a revision that no open request uses, on all ranks, and what was computed with it.

        Captured steps know no revisions: only descriptor numbers, which come with each plan.
        """
        assert not self.users_of(digest), f"revision {digest} is in use"
        self.prefix.forget(digest)
        self.roster.unregister(digest)

    @property
    def context(self) -> int:
        """The longest context that the base and every registered adapter can be given."""
        return longest_context(self.limits, self.layout, self.roster.largest)

    # --- requests ----------------------------------------------------------------------------

    def submit(self, message: Submit, digest: str) -> None:
        """Queue a request for the registered revision with this digest; "" is the base.

        Raises:
            RequestError: it can never be served as asked.
        """
        limits, params = self.limits, message.params
        adapter = self.adapters[digest] if digest else None
        if message.request_id in self._requests:
            raise RequestError("invalid_request", f"request {message.request_id} is open already")
        adapter_pages = 0 if adapter is None else adapter.pages
        check_request(message, limits, self.layout, adapter_pages)
        if adapter is not None:
            self._begin_wait(message, adapter)
        request = Request(
            id=message.request_id,
            number=next(self._numbers),
            prompt_len=len(message.prompt),
            params=params,
            seed=params.seed if params.seed is not None else next(self._seeds),
            limit=token_limit(message, limits, self.layout, adapter_pages),
            model=message.model,
            root=root_key(limits.base_digest, digest, message.salt, limits.kv_dtype),
            adapter=adapter,
            tokens=list(message.prompt),
        )
        self._requests[request.id] = request
        if adapter is not None:
            self.books.demand.refer(adapter.handle)
        self.scheduler.add(request)
        self.counters["requests"] += 1
        self.counters["prompt_tokens"] += request.prompt_len

    def abort(self, request_id: str, *, finished: bool = False) -> None:
        """End a request without further output; unknown ids are those that ended by themselves."""
        request = self._requests.get(request_id)
        if request is not None:
            self._end(request, "finished" if finished else "aborted")

    def step(self) -> list[Output | Failed]:
        """Begin a step if there is work, and hand out the tokens of one that has ended."""
        self.tiers.turn()
        outputs: list[Output | Failed] = [*self._end_unserved()]
        begun = self._begin()
        if self._under_way and (not begun or len(self._under_way) >= self._depth):
            outputs += self._complete(*self._under_way.popleft())
        elif not begun and self.tiers.busy:
            self.tiers.wait()
            self._beat()
        return outputs

    def _begin(self) -> bool:
        work = self.scheduler.schedule()
        if not work:
            return False
        plan, ordered = self._planner.step(work)
        began = time.monotonic()
        self._send(plan)
        sampled = self.worker.run(plan)
        assert sampled is not None
        self.counters["steps"] += 1
        if len({id(item.request.adapter) for item in ordered}) >= 4:
            self.counters["steps_with_4_revisions"] += 1
        self._under_way.append((ordered, sampled, began))
        return True

    def capture(self, max_rank: int = 0) -> None:
        """Let the ranks capture their steps of few rows.

        Args:
            max_rank: LoRA rank to prepare for; at least those of the adapters that there are.
        """
        plan = self._planner.capture(self.adapters.values(), max_rank)
        self._send(plan)
        self.worker.run(plan)

    def _carry_out(
        self, kind: PlanKind, numbers: Sequence[int], images: Sequence[AdapterImage] | None = None
    ) -> None:
        """Let all ranks do something about an adapter."""
        plan = self._planner.control(kind, numbers)
        self._send(plan)
        self.worker.run(plan, images)

    def control(self, kind: PlanKind) -> None:
        """Send a plan without work: a heartbeat, or the word to return or stop."""
        self._send(self._planner.control(kind))

    # --- inspection --------------------------------------------------------------------------

    def check_integrity(self) -> list[str]:
        """Faults in the page books; none when sound."""
        return self.books.check()

    def stats(self) -> Stats:
        """Gauges and counters for ``/metrics``."""
        return collect_stats(self)

    # --- inside ------------------------------------------------------------------------------

    def _begin_wait(self, message: Submit, adapter: AdapterFootprint) -> None:
        """See that a request may wait for its adapter, if it has to."""
        if not self.tiers.is_at_hand(adapter.handle):
            waits = message.wait_for_adapter and self.limits.adapter_queue > 0
            failure = None if waits else self.tiers.prefetch(adapter)
            check_wait(message, self.scheduler.num_parked, self.limits, failure)

    def _not_brought(self, adapter: AdapterFootprint, error: Exception) -> None:
        """Note whom to end because an adapter cannot be read, sent or copied."""
        log.error("revision %s of %s is not brought: %s", adapter.digest, adapter.name, error)
        self._unserved += [(request, error) for request in self.scheduler.unpark(adapter.handle)]

    def _end_unserved(self) -> Iterator[Failed]:
        for request, error in self._unserved:
            if not request.ended:  # by the one who asked, meanwhile
                self._end(request, "failed")
                yield not_brought(request, error)
        self._unserved.clear()

    def _beat(self) -> None:
        """Let the other ranks hear that rank 0 lives, if they have not for a while."""
        if time.monotonic() - self._sent > SILENCE_SECONDS:
            self.control(PlanKind.HEARTBEAT)

    def _send(self, plan: StepPlan) -> None:
        self._sent = time.monotonic()
        self.worker.channel.send(plan)

    def _complete(
        self, work: Sequence[Work], sampled: Sampled, began: float
    ) -> list[Output | Failed]:
        """Append each new token, publish confirmed blocks, and end what has ended."""
        outputs: list[Output | Failed] = []
        results = zip(
            sampled.tokens.tolist(), sampled.failed.tolist(), sampled.logprobs, strict=True
        )
        if not all(item.request.ended for item in work):  # else nobody has looked for long
            rows = sum(item.rows for item in work if item.rows > 1)
            self.books.prices.step_ended(rows, began, time.monotonic())
        for item in work:
            request = item.request
            if item.samples:
                token, failed, logprobs = next(results)
                request.pending -= 1
            if request.ended:  # while this step was under way: its token is surplus
                continue
            if item.samples and failed:
                self._end(request, "failed")
                outputs.append(not_finite(request))
                continue
            self.scheduler.publish(request)
            if item.samples:
                outputs.append(self._advance(request, token, logprobs))
        return outputs

    def _end(self, request: Request, how: str) -> None:
        """Free all that the request holds, and count it as ``how``."""
        request.ended = True
        del self._requests[request.id]
        self.scheduler.remove(request)
        if request.adapter is not None:
            self.books.demand.let_go(request.adapter.handle)
        self.counters[how] += 1

    def _advance(self, request: Request, token: int, logprobs: TokenLogprobs | None) -> Output:
        request.tokens.append(token)
        request.slot_has_last = request.slot is not None  # else it has been preempted since
        self.counters["generation_tokens"] += 1
        reason = "length" if len(request.tokens) >= request.limit else None
        if request.ends_with(token, self.limits.eos_ids):
            reason = "stop"
        if reason is not None:
            self._end(request, "finished")
        return token_output(request, token, logprobs, reason)
