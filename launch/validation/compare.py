"""Bit-for-bit comparison of live tensors with the files, and coverage over all ranks."""

from __future__ import annotations

import logging
import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from launch.validation.entry import Entry
from launch.validation.live import LiveError
from sharding import Span, WeightSlice
from tp_engine.ranks.comm import Comm

log = logging.getLogger(__name__)

CHUNK_ELEMENTS = 1 << 22
"""Elements of a whole tensor that are held at a time."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One entry's comparison on one rank."""

    elements: int
    """Compared."""
    mismatches: int = 0
    """Elements whose bits differ."""
    first: tuple[int, int] = (0, 0)
    """The first of them in row-major order: its unsharded row and column."""
    error: float = 0.0
    """Largest difference; infinite where it is not a number."""

    def numbers(self) -> list[int]:
        """As integers, for the ranks to exchange."""
        bits = struct.unpack("<q", struct.pack("<d", self.error))[0]
        return [self.elements, self.mismatches, *self.first, bits]

    @classmethod
    def of(cls, numbers: Sequence[int]) -> Outcome:
        """Inverse of `numbers`."""
        elements, mismatches, row, col, bits = numbers
        error = struct.unpack("<d", struct.pack("<q", bits))[0]
        return cls(elements=elements, mismatches=mismatches, first=(row, col), error=error)


def compare(entry: Entry) -> Outcome:
    """Compare what this rank holds of a tensor with the files, a run of rows at a time.

    A live tensor that cannot even be found counts as wrong from its first element on.
    """
    part = entry.part
    elements = part.rows.size * part.cols.size
    if not elements:
        return Outcome(elements=0)
    outcome = Outcome(elements=elements)
    try:
        step = max(1, CHUNK_ELEMENTS // entry.shape[1])
        for start in range(0, part.rows.size, step):
            rows = Span(start, min(start + step, part.rows.size))
            outcome = _add(outcome, entry, rows, *_both(entry, rows))
    except LiveError as error:
        log.error("%s: %s", entry.name, error)
        corner = (part.rows.start, part.cols.start)
        return Outcome(elements=elements, mismatches=elements, first=corner, error=math.inf)
    return outcome


def _both(entry: Entry, rows: Span) -> tuple[Tensor, Tensor]:
    """Some local rows, live and as the files say."""
    above = entry.part.rows.start
    whole = entry.whole(Span(above + rows.start, above + rows.stop))
    return entry.live.read(rows), whole[:, entry.part.cols.slice]


def _add(outcome: Outcome, entry: Entry, rows: Span, found: Tensor, whole: Tensor) -> Outcome:
    """The outcome with one more run of rows [n, k]."""
    assert found.shape == whole.shape and found.dtype == whole.dtype
    part, bits = entry.part, _BITS[found.dtype.itemsize]
    mine, right = found.contiguous().view(bits), whole.contiguous().view(bits)
    differs = mine != right
    if entry.ulps:
        assert found.dtype == torch.float32
        differs &= (mine.long() - right.long()).abs() > entry.ulps
    count = int(differs.count_nonzero())
    if not count:
        return outcome
    row, col = divmod(int(differs.flatten().int().argmax()), part.cols.size)
    first = (part.rows.start + rows.start + row, part.cols.start + col)
    error = float((found[differs].double() - whole[differs].double()).abs().max())
    return Outcome(
        elements=outcome.elements,
        mismatches=outcome.mismatches + count,
        first=outcome.first if outcome.mismatches else first,
        error=max(outcome.error, error if math.isfinite(error) else math.inf),
    )


def gather_outcomes(comm: Comm, outcomes: Sequence[Outcome]) -> list[list[Outcome]]:
    """The outcomes of every rank, on all ranks: by rank, then in the order of the entries."""
    mine = [number for outcome in outcomes for number in outcome.numbers()]
    by_rank = comm.gather_numbers(mine)
    return [
        [Outcome.of(numbers[i : i + 5]) for i in range(0, len(numbers), 5)] for numbers in by_rank
    ]


def gather_parts(comm: Comm, entries: Sequence[Entry]) -> list[list[WeightSlice]]:
    """What every rank holds of each entry, on all ranks: by rank, then in order.

    Raises:
        LiveError: the ranks do not list the same tensors.
    """
    names = "\n".join(f"{entry.kind} {entry.name} {entry.shape}" for entry in entries)
    lists = comm.gather_numbers([len(entries), zlib.crc32(names.encode())])
    if any(each != lists[0] for each in lists):
        raise LiveError(f"the ranks hold different sets of tensors: {lists} (number, checksum)")
    mine = []
    for entry in entries:
        rows, cols = entry.part.rows, entry.part.cols
        mine += [rows.start, rows.stop, cols.start, cols.stop]
    return [
        [
            WeightSlice(rows=Span(*numbers[i : i + 2]), cols=Span(*numbers[i + 2 : i + 4]))
            for i in range(0, len(numbers), 4)
        ]
        for numbers in comm.gather_numbers(mine)
    ]


def first_gap(shape: tuple[int, int], parts: Sequence[WeightSlice]) -> tuple[int, int] | None:
    """The first element of a whole tensor that is in none of the parts; None: all are covered."""
    edges = {0, shape[0], *(edge for p in parts for edge in (p.rows.start, p.rows.stop))}
    for top in sorted(edge for edge in edges if edge < shape[0]):
        at = 0
        across = [p.cols for p in parts if p.rows.start <= top < p.rows.stop]
        for cols in sorted(across, key=lambda span: span.start):
            if cols.start > at:
                break
            at = max(at, cols.stop)
        if at < shape[1]:
            return top, at
    return None
