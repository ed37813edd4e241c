"""What is lost when an entry leaves a cache, so that entries of different caches compare.

    worth = expected uses a second * seconds to bring it back / pages that go free

Expected use is the number of uses so far, each counted e times less every `LIFETIME` seconds. All
entries fade alike, so their order changes only when one is used: worth is kept as a logarithm in
which the present time cancels, and heaps stay in order by themselves.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from typing import Generic, TypeVar

K = TypeVar("K", int, bytes)

LIFETIME = 600.0
"""Seconds."""
UNUSED = -math.inf
"""Weight of what was never used."""

Worth = tuple[bool, float]
"""Whether somebody waits for it, which comes before everything else; then `log_worth`."""


def count_use(weight: float, now: float) -> float:
    """The weight after one more use: ln of the sum of e^(t / LIFETIME) over all uses at times t."""
    late = now / LIFETIME
    if weight == UNUSED:
        return late
    high, low = max(weight, late), min(weight, late)
    return high + math.log1p(math.exp(low - high))


def log_worth(weight: float, seconds: float, pages: int) -> float:
    """Logarithm of an entry's worth a page, but for a term that all entries share.

    Args:
        weight: of its uses, see `count_use`.
        seconds: to bring it back; above 0.
        pages: that it takes.
    """
    return weight + math.log(seconds / pages)


class Candidates(Generic[K]):
    """Entries that may go, the least worth first; of equal ones, the one put in first."""

    def __init__(self) -> None:
        self._heap: list[tuple[Worth, int, K]] = []
        self._valid: dict[K, tuple[Worth, int]] = {}
        self._puts = 0

    def __len__(self) -> int:
        return len(self._valid)

    def __contains__(self, key: K) -> bool:
        return key in self._valid

    def __iter__(self) -> Iterator[K]:
        return iter(self._valid)

    def put(self, key: K, worth: Worth) -> None:
        """Let an entry go when its turn comes; again: with another worth."""
        self._puts += 1
        self._valid[key] = worth, self._puts
        heapq.heappush(self._heap, (worth, self._puts, key))
        if len(self._heap) > 2 * len(self._valid) + 64:
            self._heap = [(worth, put, key) for key, (worth, put) in self._valid.items()]
            heapq.heapify(self._heap)

    def discard(self, key: K) -> None:
        """Keep an entry, if it was one."""
        self._valid.pop(key, None)

    def cheapest(self) -> tuple[Worth, K] | None:
        """The entry that is worth least, which stays; None when there is none."""
        while self._heap:
            worth, put, key = self._heap[0]
            if self._valid.get(key) == (worth, put):
                return worth, key
            heapq.heappop(self._heap)
        return None
