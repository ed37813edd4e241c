"""What the names may mean at any moment, as the operators know it.

A call takes effect at some moment between when it was sent and when it was answered. A request
that was sent at s and whose answer began at e may get what the name meant at s, or what any call
that was open between s and e gave it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field

NOTHING = ""
"""As a digest: the name means nothing."""
DRAINING = "draining"
"""As a digest: the name takes no requests."""


@dataclass(slots=True)
class Move:
    """One change of a name's meaning."""

    began: float
    """When it was asked for, by ``time.monotonic``."""
    ended: float | None = None
    """When it was answered."""
    digest: str | None = None
    """What the name means since; None: not known yet, or nothing changed."""


@dataclass(slots=True)
class Name:
    """One adapter's name; ``lock`` is held while its meaning is changed."""

    name: str
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    moves: list[Move] = field(default_factory=list)
    past: list[str] = field(default_factory=list)
    """Revisions that it meant, the present one last."""
    pushes: list[bool] = field(default_factory=list)
    """Whether it came to mean each of them by a push."""
    drained: list[tuple[float, float]] = field(default_factory=list)
    """When it may have taken no requests, by ``time.monotonic``."""
    undone: list[str] = field(default_factory=list)
    """Revisions that were rolled back, to which it can be promoted until it moves on."""

    def begin(self) -> Move:
        """A change that has been asked for."""
        move = Move(began=time.monotonic())
        self.moves.append(move)
        return move

    def moved(self, move: Move, digest: str, *, pushed: bool = False) -> None:
        """A load, a promotion or a push has been done; pushes on end count as one."""
        move.digest = digest
        self.undone.clear()
        if self.past[-1:] == [digest]:
            self.pushes[-1] &= pushed
            return
        if pushed and self.pushes[-1:] == [True]:
            self.past.pop()
            self.pushes.pop()
        self.past.append(digest)
        self.pushes.append(pushed)

    def rolled_back(self, move: Move) -> None:
        """It means what it meant before."""
        self.undone.append(self.past.pop())
        self.pushes.pop()
        move.digest = self.past[-1]

    def gone(self, move: Move) -> None:
        """It means nothing any more."""
        for each in (self.past, self.pushes, self.undone):
            each.clear()
        move.digest = NOTHING

    def meanings(self, sent: float, answered: float) -> set[str | None]:
        """What it may have meant for a request; None stands for a change still unanswered."""
        settled, found = NOTHING, set[str | None]()
        for move in self.moves:
            if move.ended is not None and move.ended < sent:
                settled = settled if move.digest is None else move.digest
            elif move.began <= answered and (move.digest is not None or move.ended is None):
                found.add(move.digest)
        draining = any(began <= answered and ended >= sent for began, ended in self.drained)
        return {settled, *found, *([DRAINING] if draining else [])}


class Ledger:
    """All names, and counts of what happened."""

    def __init__(self, names: list[str]) -> None:
        self.names = [Name(name) for name in names]
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []
        """Everything that should not have happened, in words."""

    def fault(self, text: str) -> None:
        """Note something that should not have happened."""
        self.faults.append(text)
