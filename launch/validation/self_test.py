"""Proof that the comparison can fail: damage one bit at a time, and it must say exactly where.

All ranks draw the same places from one seed; only the rank that was drawn does the damage. A round
compares all tensors of the damaged tensor's layer on all ranks (or all that belong to no layer):
once damaged, once restored. After the last round everything is compared once more.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from launch.validation.compare import compare, gather_outcomes
from launch.validation.entry import Entry, Kind
from launch.validation.tensors import Parts, find_mismatches
from sharding import WeightSlice
from tp_engine.ranks.comm import Comm

NEVER = frozenset({Kind.RANK})
"""Not damaged: a wrong LoRA rank rightly shows in A and B of its module too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Damage:
    """One place, in unsharded indices."""

    entry: int
    """Index among the entries."""
    rank: int
    row: int
    col: int
    bit: int
    """A number, taken modulo the bits of the element."""
    shown: tuple[int, int]
    """Where the comparison must see it first: the first element that shares the damaged value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """What came of one damage."""

    tensor: str
    kind: str
    rank: int
    index: str
    ok: bool
    found: tuple[str, ...]
    """What the comparison named; exactly the damage when ok."""
    after: tuple[str, ...]
    """What it named once the bits were restored: nothing when ok."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SelfTest:
    """All rounds of one seed."""

    seed: int
    rounds: tuple[Round, ...]
    clean: bool
    """Whether the whole comparison found nothing once all bits were restored."""

    @property
    def ok(self) -> bool:
        """Whether every damage was named, and nothing else."""
        return self.clean and all(each.ok for each in self.rounds)

    def as_dict(self) -> dict[str, object]:
        """For the machines' report."""
        return {**asdict(self), "ok": self.ok}


def run_self_test(
    comm: Comm, entries: Sequence[Entry], parts: Parts, *, seed: int, rounds: int
) -> SelfTest:
    """Damage, compare and restore; every rank must call it with the same arguments.

    Args:
        comm: of the ranks.
        entries: this rank's.
        parts: of all ranks, see `launch.validation.tensors.check_tensors`.
        seed: of all draws.
        rounds: damages.

    Raises:
        ValueError: there is nothing to damage.
    """
    known = comm.gather_numbers([int(_has_cells(entry)) for entry in entries])
    places = draw_damages(entries, parts, known, random.Random(seed), rounds)
    done = tuple(_round(comm, entries, damage) for damage in places)
    clean = not _compare(comm, entries)
    return SelfTest(seed=seed, rounds=done, clean=clean)


def draw_damages(
    entries: Sequence[Entry],
    parts: Parts,
    known: Sequence[Sequence[int]],
    draw: random.Random,
    rounds: int,
) -> list[Damage]:
    """Places to damage: the kinds in random order and in turn, so that none is left out.

    ``known`` tells by rank and entry whether the places of its elements are known.
    """
    by_kind: dict[Kind, list[tuple[int, int]]] = {}
    for rank, held in enumerate(parts):
        for i, (entry, part) in enumerate(zip(entries, held, strict=True)):
            if known[rank][i] and part.rows.size * part.cols.size and entry.kind not in NEVER:
                by_kind.setdefault(entry.kind, []).append((i, rank))
    if not by_kind:
        raise ValueError("no tensor to damage")
    kinds = [kind for kind in Kind if kind in by_kind]
    draw.shuffle(kinds)
    damages = []
    for number in range(rounds):
        i, rank = draw.choice(by_kind[kinds[number % len(kinds)]])
        damages.append(_draw_element(entries[i], parts[rank][i], draw, i, rank))
    return damages


def _has_cells(entry: Entry) -> bool:
    part = entry.part
    return bool(part.rows.size * part.cols.size) and entry.live.cell(0, 0) is not None


def _draw_element(
    entry: Entry, part: WeightSlice, draw: random.Random, i: int, rank: int
) -> Damage:
    row = draw.randrange(part.rows.start, part.rows.stop)
    col = draw.randrange(part.cols.start, part.cols.stop)
    # A live value may stand for the part of a block that lies in this row of the slice.
    element = row * entry.shape[1] + col
    first = element - element % entry.block - row * entry.shape[1]
    return Damage(
        entry=i,
        rank=rank,
        row=row,
        col=col,
        bit=draw.randrange(64),
        shown=(row, max(first, part.cols.start)),
    )


def _round(comm: Comm, entries: Sequence[Entry], damage: Damage) -> Round:
    entry = entries[damage.entry]
    scope = [each for each in entries if each.layer == entry.layer]
    wanted = (entry.kind.value, entry.name, damage.rank, entry.index(*damage.shown))
    _flip(comm, entry, damage)
    try:
        found = _compare(comm, scope)
    finally:
        _flip(comm, entry, damage)
    after = _compare(comm, scope)
    return Round(
        tensor=entry.name,
        kind=entry.kind.value,
        rank=damage.rank,
        index=entry.index(damage.row, damage.col),
        ok=found == [wanted] and not after,
        found=tuple(map(str, found)),
        after=tuple(map(str, after)),
    )


def _flip(comm: Comm, entry: Entry, damage: Damage) -> None:
    """Invert the drawn bit on the drawn rank; done twice it is as before."""
    if comm.rank == damage.rank:
        part = entry.part
        cell = entry.live.cell(damage.row - part.rows.start, damage.col - part.cols.start)
        assert cell is not None
        cell.flip(damage.bit % len(cell.bits))


def _compare(comm: Comm, entries: Sequence[Entry]) -> list[tuple[str, str, int | None, str]]:
    """What differs: kind, tensor, rank, first index."""
    by_rank = gather_outcomes(comm, [compare(entry) for entry in entries])
    return [(m.check, m.tensor, m.rank, m.index) for m in find_mismatches(entries, by_rank)]
