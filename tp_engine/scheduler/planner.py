"""Turns the work of a step into the plan that all ranks follow.

Sequences of one row come first, then the others; in both, those of one adapter are neighbours.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from itertools import groupby
from operator import or_
from typing import TypedDict

import numpy as np

from tp_engine.memory import AdapterFootprint, PagePool
from tp_engine.sampling import sampling_needs, slot_init
from tp_engine.scheduler.request import Request, Work
from tp_engine.steps.plan import LAST_SAMPLED, NO_ADAPTER, IntArray, PlanKind, StepPlan


class Planner:
    """Numbers the plans and tells the ranks only what they do not know yet."""

    def __init__(self, pool: PagePool, eos_ids: tuple[int, ...]) -> None:
        self._pool = pool
        self._eos_ids = eos_ids
        self._step = 0

    def control(self, kind: PlanKind, adapter: Sequence[int] = ()) -> StepPlan:
        """A plan without a step."""
        return StepPlan(kind=kind, step=self._next(), adapter=_array(adapter))

    def capture(self, adapters: Iterable[AdapterFootprint], max_rank: int) -> StepPlan:
        """The plan to prepare for these adapters and for LoRA ranks up to ``max_rank``."""
        needs = _needs(adapters)
        needs["max_rank"] = max(needs["max_rank"], max_rank)
        return StepPlan(kind=PlanKind.CAPTURE, step=self._next(), **needs)

    def step(self, work: Sequence[Work]) -> tuple[StepPlan, list[Work]]:
        """The plan for some work, and the same work in the order of the plan's sequences."""
        ordered = sorted(work, key=lambda item: (item.rows > 1, _descriptor(item)))
        for item in ordered:
            self._check_pages(item.request)
        sampled = [item.request.params for item in ordered if item.samples]
        candidates, full_rows = sampling_needs(sampled)
        adapters = [item.request.adapter for item in ordered if item.request.adapter]
        plan = StepPlan(
            kind=PlanKind.STEP,
            step=self._next(),
            opens=_array(self._opens(ordered)),
            page_updates=_array(_page_updates(ordered)),
            sequences=_array([number for item in ordered for number in _sequence(item)]),
            tokens=_array([token for item in ordered for token in _tokens(item)]),
            segments=_array(_segments(ordered)),
            **_needs(adapters),
            candidates=candidates,
            full_rows=_array(full_rows),
        )
        return plan, ordered

    def _next(self) -> int:
        self._step += 1
        return self._step - 1

    def _check_pages(self, request: Request) -> None:
        """A page set that was released since it was taken must never reach a rank."""
        assert self._pool.current(request.pages, request.generations), f"stale pages: {request.id}"
        resident = request.resident
        if resident is not None:
            assert resident.ready, f"adapter of {request.id} is still on its way"
            assert self._pool.current(resident.pages, resident.generations), "stale adapter pages"

    def _opens(self, work: Sequence[Work]) -> list[int]:
        words: list[int] = []
        for item in work:
            request = item.request
            if request.slot_is_new:
                request.slot_is_new = False
                words += slot_init(
                    _slot(request),
                    request.params,
                    seed=request.seed,
                    prompt=request.tokens[: request.prompt_len],
                    output=request.tokens[request.prompt_len :],
                    eos_ids=self._eos_ids,
                    prompt_len=request.prompt_len,
                ).encode()
        return words


class _Needs(TypedDict):
    """What a plan says of all its adapters together."""

    max_rank: int
    traits: int


def _needs(adapters: Iterable[AdapterFootprint]) -> _Needs:
    known = list(adapters)
    return {
        "max_rank": max((adapter.max_rank for adapter in known), default=0),
        "traits": reduce(or_, (adapter.traits for adapter in known), 0),
    }


def _array(words: Sequence[int]) -> IntArray:
    return np.array(words, np.int64)


def _slot(request: Request) -> int:
    assert request.slot is not None
    return request.slot


def _sequence(item: Work) -> tuple[int, int, int, int]:
    return _slot(item.request), item.rows, item.start + item.rows, int(item.samples)


def _descriptor(item: Work) -> int:
    resident = item.request.resident
    return NO_ADAPTER if resident is None else resident.descriptor


def _page_updates(work: Sequence[Work]) -> list[int]:
    words: list[int] = []
    for item in work:
        request = item.request
        for index in range(request.pages_told, len(request.pages)):
            words += [_slot(request), index, request.pages[index]]
        request.pages_told = len(request.pages)
    return words


def _tokens(item: Work) -> list[int]:
    """Literal tokens, but for one that the slot has sampled itself, whose id may be unknown."""
    request = item.request
    tokens = request.tokens[item.start : item.start + item.rows]
    if request.slot_has_last and item.start + item.rows >= len(request.tokens):
        del tokens[len(request.tokens) - 1 - item.start :]
    return tokens + [LAST_SAMPLED] * (item.rows - len(tokens))


def _segments(work: Sequence[Work]) -> list[int]:
    words: list[int] = []
    for descriptor, items in groupby(work, key=_descriptor):
        words += [sum(item.rows for item in items), descriptor]
    return words
