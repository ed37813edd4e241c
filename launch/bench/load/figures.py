"""Figures of a run: rates, delays and their percentiles, in all and by tenant."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from launch.bench.load.answer import Answer
from launch.bench.load.workload import Request

PERCENTILES = (50, 90, 99)


def percentile(values: Sequence[float], percent: float) -> float:
    """The percentile of ``values``, linear between neighbours.

    Raises:
        ValueError: there are none.
    """
    if not values:
        raise ValueError("values: a percentile needs at least one")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def milliseconds(values: Sequence[float]) -> dict[str, float]:
    """Mean and `PERCENTILES` of seconds, in milliseconds; empty when there are no values."""
    if not values:
        return {}
    found = {"mean": sum(values) / len(values)}
    found |= {f"p{percent}": percentile(values, percent) for percent in PERCENTILES}
    return {name: round(1000 * value, 2) for name, value in found.items()}


def figures(answers: Sequence[Answer]) -> dict[str, Any]:
    """Rates over the time from the first request to the last token; all answers are whole."""
    seconds = max(a.ended for a in answers) - min(a.sent for a in answers)
    gaps = [after - before for a in answers for before, after in pairwise(a.events)]
    per_token = [a.per_token_s for a in answers]
    return {
        "requests": len(answers),
        "seconds": round(seconds, 3),
        "tokens": sum(a.tokens for a in answers),
        "tokens_per_s": round(sum(a.tokens for a in answers) / seconds, 1),
        "requests_per_s": round(len(answers) / seconds, 3),
        "events_per_token": round(
            sum(len(a.events) for a in answers) / sum(a.tokens for a in answers), 3
        ),
        "ttft_ms": milliseconds([a.first_s for a in answers]),
        "tpot_ms": milliseconds([value for value in per_token if value is not None]),
        "itl_ms": milliseconds(gaps),
        "e2e_ms": milliseconds([a.whole_s for a in answers]),
    }


def by_tenant(requests: Sequence[Request], answers: Sequence[Answer]) -> dict[str, Any]:
    """`figures` of each tenant, when there are several."""
    return _by(requests, answers, lambda request: f"tenant-{request.tenant}")


def _by(
    requests: Sequence[Request], answers: Sequence[Answer], key: Callable[[Request], str]
) -> dict[str, Any]:
    groups: dict[str, list[Answer]] = {}
    for request, answer in zip(requests, answers, strict=True):
        groups.setdefault(key(request), []).append(answer)
    return {name: figures(group) for name, group in sorted(groups.items())} if groups else {}


def faults(requests: Sequence[Request], answers: Sequence[Answer]) -> list[str]:
    """What is wrong with the answers of a run; none when all are whole and as long as asked."""
    found = []
    for request, answer in zip(requests, answers, strict=True):
        if answer.error is not None:
            found.append(f"request {request.index}: {answer.error}")
        elif answer.tokens != request.tokens:
            found.append(
                f"request {request.index}: {answer.tokens} tokens instead of {request.tokens}"
            )
        elif len(answer.events) > answer.tokens:
            found.append(
                f"request {request.index}: {len(answer.events)} events for {answer.tokens} tokens"
            )
    return found
