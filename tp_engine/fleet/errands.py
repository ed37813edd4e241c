"""What the fleet has others do, and what it remembers of it meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tp_engine.adapters import AdapterImage, AdapterRevision
from tp_engine.messages import LoadAdapter, MoveAdapter

Loaded = tuple[AdapterRevision, Sequence[AdapterImage]]


class Loader(Protocol):
    """What is slow; every method is called in one other thread, in the order of the calls.

    A ValueError refuses the call and says why.
    """

    def load(self, directory: Path) -> Loaded:
        """Keep, read, check, cut and pack an adapter."""
        ...

    def load_kept(self, name: str, digest: str | None) -> Loaded:
        """Read and pack a revision of the store; None: the one before a name's last move."""
        ...

    def record(self, name: str, digest: str) -> None:
        """Make it last that a name means a revision."""
        ...

    def roll_back(self, name: str, digest: str) -> None:
        """Make it last that a name means what it meant before its last move, this revision."""
        ...

    def history(self, name: str) -> list[str]:
        """Revisions that a name meant, the present one first."""
        ...

    def erase(self, name: str) -> None:
        """Make it last that a name means nothing."""
        ...


class CallError(ValueError):
    """A call that is refused; ``code`` is for programs."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(slots=True, eq=False)
class Loading:
    """One load on its way."""

    call: LoadAdapter | MoveAdapter
    name: str
    loaded: Future[Loaded]
    record: Callable[[str, str], None]
    """What makes it last."""
    revision: AdapterRevision | None = None
    """Once it is read."""
    recorded: Future[None] | None = None
    """Once all ranks have it."""
