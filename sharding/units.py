"""Spans of indices, and the one rule by which indivisible units are dealt to ranks."""

from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Span", "deal"]


@dataclass(frozen=True, slots=True)
class Span:
    """A contiguous range ``start <= index < stop`` of non-negative indices; may be empty."""

    start: int
    """First index."""
    stop: int
    """One past the last index."""

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise ValueError(f"span {self.start}:{self.stop} must have 0 <= start <= stop")

    @property
    def size(self) -> int:
        """Number of indices."""
        return self.stop - self.start

    @property
    def slice(self) -> slice:
        """The span as a Python slice."""
        return slice(self.start, self.stop)

    def __iter__(self) -> Iterator[int]:
        """Yield the indices in ascending order."""
        return iter(range(self.start, self.stop))

    def times(self, width: int, limit: int | None = None) -> "Span":
        """Turn a span of units into a span of elements.

        Each unit covers ``width`` elements; ``limit`` is the number of elements in all, where the
        last unit may be partial.
        """
        start, stop = self.start * width, self.stop * width
        return Span(start, stop) if limit is None else Span(min(start, limit), min(stop, limit))


def spans_of(sizes: list[int], start: int = 0) -> tuple[Span, ...]:
    """Lay spans of the given sizes one after the other, beginning at ``start``."""
    spans = []
    for size in sizes:
        spans.append(Span(start, start + size))
        start += size
    return tuple(spans)


def deal(units: int, ranks: int, turn: int = 0) -> tuple[Span, ...]:
    """Deal ``units`` to ``ranks``: contiguous, in rank order, sizes differing by at most one.

    The ``units % ranks`` ranks that get one unit more are ``turn, turn + 1, ...`` (modulo
    ``ranks``). A caller that deals many layers counts the extra units dealt so far and passes the
    count as ``turn``: the extras of all layers then form one stream that goes round the ranks, so
    the totals over the layers also differ by at most one, whatever the units of each layer are.

    Raises:
        ValueError: if ``units`` or ``turn`` is negative or ``ranks`` is not positive.
    """
    if units < 0 or ranks < 1 or turn < 0:
        raise ValueError(
            f"units={units}, ranks={ranks}, turn={turn}: need units >= 0, ranks >= 1, turn >= 0"
        )
    even, extras = divmod(units, ranks)
    return spans_of([even + ((rank - turn) % ranks < extras) for rank in range(ranks)])
