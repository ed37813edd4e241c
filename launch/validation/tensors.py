"""The first check: every live tensor of every rank against the files, and nothing left out."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence

from launch.validation.compare import (
    Outcome,
    compare,
    first_gap,
    gather_outcomes,
    gather_parts,
)
from launch.validation.entry import Entry, Kind
from launch.validation.result import Check, Mismatch, Result
from sharding import WeightSlice
from tp_engine.ranks.comm import Comm

Parts = list[list[WeightSlice]]
"""By rank, then in the order of the entries."""


def check_tensors(comm: Comm, entries: Sequence[Entry]) -> tuple[Result, Parts]:
    """Compare all entries on all ranks; the same result everywhere, and what each rank holds.

    Raises:
        LiveError: the ranks do not list the same tensors.
    """
    parts = gather_parts(comm, entries)
    seconds: dict[Kind, float] = defaultdict(float)
    outcomes = []
    for entry in entries:
        start = time.perf_counter()
        outcomes.append(compare(entry))
        seconds[entry.kind] += time.perf_counter() - start
    by_rank = gather_outcomes(comm, outcomes)
    kinds = [kind for kind in Kind if kind in seconds]
    times = comm.gather_numbers([int(1e6 * seconds[kind]) for kind in kinds])
    checks = {kind: Check(name=kind.value) for kind in kinds}
    for i, kind in enumerate(kinds):
        checks[kind].seconds = max(numbers[i] for numbers in times) / 1e6
    result = Result(checks=list(checks.values()))
    for i, entry in enumerate(entries):
        _count(checks[entry.kind], [outcomes[i] for outcomes in by_rank])
    result.mismatches = find_mismatches(entries, by_rank)
    result.add(_check_coverage(entries, parts))
    return result, parts


def find_mismatches(
    entries: Sequence[Entry], by_rank: Sequence[Sequence[Outcome]]
) -> list[Mismatch]:
    """Every (entry, rank) that differs."""
    return [
        Mismatch(
            check=entry.kind.value,
            tensor=entry.name,
            rank=rank,
            index=entry.index(*outcomes[i].first),
            detail=f"{outcomes[i].mismatches} of {outcomes[i].elements} elements differ",
        )
        for i, entry in enumerate(entries)
        for rank, outcomes in enumerate(by_rank)
        if outcomes[i].mismatches
    ]


def _count(check: Check, outcomes: Sequence[Outcome]) -> None:
    check.tensors += 1
    check.elements += sum(outcome.elements for outcome in outcomes)
    check.mismatches += sum(outcome.mismatches for outcome in outcomes)
    check.error = max([check.error, *(outcome.error for outcome in outcomes)])


def _check_coverage(entries: Sequence[Entry], parts: Parts) -> Result:
    """The ranks' slices together must hold every element of every tensor."""
    start = time.perf_counter()
    check = Check(name="coverage", tensors=len(entries))
    result = Result(checks=[check])
    for i, entry in enumerate(entries):
        check.elements += entry.shape[0] * entry.shape[1]
        gap = first_gap(entry.shape, [held[i] for held in parts])
        if gap is not None:
            check.mismatches += 1
            result.mismatches.append(
                Mismatch(
                    check=check.name,
                    tensor=f"{entry.name} ({entry.kind})",
                    rank=None,
                    index=entry.index(*gap),
                    detail="which no rank holds",
                )
            )
    check.seconds = time.perf_counter() - start
    return result
