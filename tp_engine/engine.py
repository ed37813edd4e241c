"""The engine on rank 0: takes requests, makes plans, runs them on all ranks, gives tokens back."""

from __future__ import annotations

import random
import secrets
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

from tp_engine.adapters import AdapterImage
from tp_engine.admission import (
    EngineLimits,
    RequestError,
    check_request,
    longest_context,
    token_limit,
)
from tp_engine.memory import AdapterFootprint, AdapterResidency, PageLayout, PagePool, PrefixCache
from tp_engine.memory import root_key as prefix_root
from tp_engine.messages import Failed, Output, Stats, Submit, TokenLogprobs
from tp_engine.params import SamplingParams
from tp_engine.plan import PlanKind, StepPlan
from tp_engine.roster import AdapterRoster
from tp_engine.sampling import Sampled
from tp_engine.scheduler import Planner, Request, Scheduler, Work
from tp_engine.stats import collect_stats
from tp_engine.worker import Worker


class Engine:
    """Everything rank 0 decides. `step` is one turn: plan, run, hand out tokens."""

    def __init__(
        self,
        worker: Worker,
        limits: EngineLimits,
        *,
        descriptor_words: int,
        idle_adapter_pages: int,
        prefix_caching: bool,
        seed: int | None,
        depth: int,
    ) -> None:
        """Begin with an empty arena.

        Args:
            descriptor_words: size of the ranks' descriptor tensors.
            idle_adapter_pages: most pages that adapters without a running request may keep.
            prefix_caching: whether computed blocks are kept for later requests.
            seed: of the seeds for requests that bring none; None draws them.
            depth: steps that may be under way at a time: with 2, a plan is made while the step
                before it runs.
        """
        self._depth = depth
        self._under_way: deque[tuple[list[Work], Sampled]] = deque()
        self.worker = worker
        self.limits = limits
        self.layout: PageLayout = worker.runner.arena.layout
        self._ticks = 0
        self.pool = PagePool(limits.num_pages)
        self.prefix = PrefixCache(self.pool, self._clock, enabled=prefix_caching)
        self.residency = AdapterResidency(
            self.pool, descriptor_words, idle_adapter_pages, self._clock
        )
        self.scheduler = Scheduler(
            layout=self.layout,
            pool=self.pool,
            prefix=self.prefix,
            residency=self.residency,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
        )
        self._planner = Planner(self.pool, self.residency, limits.eos_ids)
        self._requests: dict[str, Request] = {}
        self.roster = AdapterRoster(
            self._carry_out,
            worker.delivery,
            self.residency,
            num_pages=limits.num_pages,
        )
        self._seeds = _seed_source(seed)
        self.counters: dict[str, float] = dict.fromkeys(
            ("steps", "prompt_tokens", "generation_tokens", "requests", "finished", "aborted"), 0.0
        )
        self.counters |= {"failed": 0.0, "steps_with_4_revisions": 0.0}

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
        """Forget a revision that no open request uses, on all ranks."""
        assert not self.users_of(digest), f"revision {digest} is in use"
        self.roster.unregister(digest)

    @property
    def context(self) -> int:
        """The longest context that the base and every registered adapter can be given."""
        largest = max((adapter.pages for adapter in self.adapters.values()), default=0)
        return longest_context(self.limits, self.layout, largest)

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
        request = Request(
            id=message.request_id,
            prompt_len=len(message.prompt),
            params=params,
            seed=params.seed if params.seed is not None else next(self._seeds),
            limit=token_limit(message, limits, self.layout, adapter_pages),
            model=message.model,
            root=prefix_root(limits.base_digest, digest, message.salt, limits.kv_dtype),
            adapter=adapter,
            tokens=list(message.prompt),
        )
        self._requests[request.id] = request
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
        begun = self._begin()
        if self._under_way and (not begun or len(self._under_way) >= self._depth):
            return self._complete(*self._under_way.popleft())
        return []

    def _begin(self) -> bool:
        work = self.scheduler.schedule()
        if not work:
            return False
        plan, ordered = self._planner.step(work)
        self._send(plan)
        sampled = self.worker.run(plan)
        assert sampled is not None
        self.counters["steps"] += 1
        if len({id(item.request.adapter) for item in ordered}) >= 4:
            self.counters["steps_with_4_revisions"] += 1
        self._under_way.append((ordered, sampled))
        return True

    def capture(self, max_rank: int = 0) -> None:
        """Let the ranks capture their steps of few rows.

        Args:
            max_rank: LoRA rank to prepare for; at least those of the adapters that there are.
        """
        ranks = [max_rank, *(adapter.max_rank for adapter in self.adapters.values())]
        plan = self._planner.control(PlanKind.CAPTURE, max_rank=max(ranks))
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
        return self.pool.check(self.scheduler.held_pages(), self.prefix.idle_pages)

    def stats(self) -> Stats:
        """Gauges and counters for ``/metrics``."""
        return collect_stats(self)

    # --- inside ------------------------------------------------------------------------------

    def _clock(self) -> int:
        self._ticks += 1
        return self._ticks

    def _send(self, plan: StepPlan) -> None:
        self.worker.channel.send(plan)

    def _complete(self, work: Sequence[Work], sampled: Sampled) -> list[Output | Failed]:
        """Append each new token, publish confirmed blocks, and end what has ended."""
        outputs: list[Output | Failed] = []
        results = zip(
            sampled.tokens.tolist(), sampled.failed.tolist(), sampled.logprobs, strict=True
        )
        for item in work:
            request = item.request
            if item.samples:
                token, failed, logprobs = next(results)
                request.pending -= 1
            if request.ended:  # while this step was under way: its token is surplus
                continue
            if item.samples and failed:
                outputs.append(self._fail(request))
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
        self.counters[how] += 1

    def _advance(self, request: Request, token: int, logprobs: TokenLogprobs | None) -> Output:
        request.tokens.append(token)
        request.slot_has_last = request.slot is not None  # else it has been preempted since
        self.counters["generation_tokens"] += 1
        params = request.params
        ended = _is_end(params, token, self.limits.eos_ids, request.output_len)
        reason = "stop" if ended else None
        if not ended and len(request.tokens) >= request.limit:
            reason = "length"
        if reason is not None:
            self._end(request, "finished")
        return Output(
            request_id=request.id,
            tokens=[] if ended else [token],
            logprobs=None if logprobs is None else [] if ended else [logprobs],
            finish_reason=reason,
            stop_token=token if ended else None,
            prompt_tokens=request.prompt_len,
            cached_tokens=request.cached_tokens,
            completion_tokens=request.output_len,
        )

    def _fail(self, request: Request) -> Failed:
        self._end(request, "failed")
        return Failed(
            request_id=request.id,
            code="numerical_error",
            message=f"the model's output for {request.model} is not finite",
        )


def _is_end(params: SamplingParams, token: int, eos_ids: tuple[int, ...], output_len: int) -> bool:
    if output_len <= params.min_tokens and params.min_tokens > 0:
        return False
    return token in params.stop_token_ids or (not params.ignore_eos and token in eos_ids)


def _seed_source(seed: int | None) -> Iterator[int]:
    """Seeds for requests that bring none; a fixed sequence when the engine has a seed."""
    draw = secrets.randbelow if seed is None else random.Random(seed).randrange
    while True:
        yield draw(2**63)
