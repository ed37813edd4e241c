"""How long the engine's steps took, and what of it was the engine's own.

`serve.py` of this folder has every rank note its steps. All processes of a host share one clock
and, in a soak, few cores: a step also lasts as long as another process had a rank's core. That
wait is known to the kernel (``schedstat``) and is taken off: what is left is work, waiting for
each other, and waiting for anything inside the process, such as a loader that holds the
interpreter's lock. It also holds what gloo's own threads waited for a core, which overlaps with all
else: on a machine that is `starved` single steps say little, medians still do.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

FIELDS = ("step", "began", "ended", "waited", "rows", "sequences")
"""Of a record, float64: number of the plan; seconds by ``time.monotonic`` at both ends; seconds
that the thread was ready to run but had no core; rows and sequences of the step."""

Records = npt.NDArray[np.float64]
LIMIT = 3.0
"""Times the median of its kind that a step may take."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """The steps of one kind."""

    name: str
    count: int
    median: float
    """Seconds of the engine's own time."""
    p99: float
    longest: float
    over: int
    """Steps longer than `LIMIT` medians."""
    over_wall: int
    """The same by the clock on the wall, the cores' other users included."""


def read_records(directory: Path, ranks: int) -> list[Records]:
    """By rank."""
    width = len(FIELDS)
    return [
        np.fromfile(directory / f"steps-{rank}", np.float64).reshape(-1, width)
        for rank in range(ranks)
    ]


def own_seconds(records: Sequence[Records]) -> tuple[Records, Records, Records]:
    """Rank 0's records, with each step's time on the wall and its own time."""
    steps = set.intersection(*(set(each[:, 0]) for each in records))
    kept = [each[np.isin(each[:, 0], list(steps))] for each in records]
    wall = np.max([each[:, 2] - each[:, 1] for each in kept], axis=0)
    waited = np.sum([each[:, 3] for each in kept], axis=0)
    return kept[0], wall, np.maximum(wall - waited, 0.0)


def starved(wall: Records, own: Records) -> float:
    """The share of all steps' time in which the ranks were ready to run and had no core."""
    return float(1 - own.sum() / wall.sum())


def kinds_of(
    first: Records, wall: Records, own: Records, loads: Sequence[tuple[float, float]]
) -> list[Kind]:
    """Steps of decoding alone and of prompts, while nothing was loaded and while something was.

    The limit of each is `LIMIT` medians of its like without loads.
    """
    loading = _overlaps(first, sorted(loads))
    decodes = first[:, 4] == first[:, 5]
    kinds = []
    for name, mask in (("decode", decodes), ("with prompts", ~decodes)):
        quiet = mask & ~loading
        if not quiet.any():
            continue
        for suffix, chosen in (("", quiet), (" during a load", mask & loading)):
            if chosen.any():
                kinds.append(_kind(name + suffix, own[chosen], wall[chosen], np.median(own[quiet])))
    return kinds


def _kind(name: str, own: Records, wall: Records, median: np.floating) -> Kind:
    limit = LIMIT * float(median)
    return Kind(
        name=name,
        count=len(own),
        median=float(np.median(own)),
        p99=float(np.quantile(own, 0.99)),
        longest=float(own.max()),
        over=int((own > limit).sum()),
        over_wall=int((wall > limit).sum()),
    )


def _overlaps(first: Records, loads: list[tuple[float, float]]) -> npt.NDArray[np.bool_]:
    """Whether something was being loaded during each step."""
    starts = [began for began, _ in loads]
    ends = np.maximum.accumulate([ended for _, ended in loads]) if loads else np.zeros(0)
    found = np.zeros(len(first), np.bool_)
    for at, (began, ended) in enumerate(first[:, 1:3]):
        before = bisect.bisect_left(starts, ended)
        found[at] = before > 0 and ends[before - 1] > began
    return found
