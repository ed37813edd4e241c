"""What the fleet has others do, and what it remembers of it meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tp_engine.adapters import AdapterImage, AdapterRevision
from tp_engine.messages import LoadAdapter, MoveAdapter, PushAdapter

Loaded = tuple[AdapterRevision, Sequence[AdapterImage]]
LetGo = list[str]
"""Revisions that no name refers to any more, to `Loader.discard` when nobody runs them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """What the store knows of a name."""

    history: list[str]
    """Revisions that it meant, the present one first."""
    on_disk: bool = False
    """Whether the store has the revision."""
    base: str = ""
    """SHA-256 of the base that the revision was registered for, in hex; empty without a store."""
    manifest: dict[str, Any] | None = None
    """Of the revision, if that was asked for and the store has it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftOut:
    """What a name of the store means, but cannot be served."""

    digest: str
    reason: str


class Loader(Protocol):
    """What is slow; every method is called in one other thread, in the order of the calls.

    What is loaded is not discarded before `settled` says that it has its name, or will not get
    one. A ValueError refuses the call and says why.
    """

    @property
    def left_out(self) -> Mapping[str, LeftOut]:
        """Names that the store knows and that are not served."""
        ...

    def load(self, directory: Path, source: str = "") -> Loaded:
        """Keep, read, check, cut and pack an adapter; ``source`` is where it was fetched from."""
        ...

    def load_kept(self, name: str, revision: str | None) -> Loaded:
        """Read and pack a revision of the store, named by its digest or, of the name's own, the
        first digits of that; None: the one before the name's last move."""
        ...

    def load_pushed(self, directory: Path) -> Loaded:
        """Read, check, cut and pack what was pushed; the directory is the loader's from now on."""
        ...

    def drop(self, directory: Path) -> None:
        """Delete what was pushed and refused unread."""
        ...

    def settled(self, digest: str) -> None:
        """What was loaded has its name, or will not get one."""
        ...

    def record(self, name: str, digest: str) -> LetGo:
        """Make it last that a name means a revision."""
        ...

    def roll_back(self, name: str, digest: str) -> LetGo:
        """Make it last that a name means what it meant before its last move, this revision."""
        ...

    def write_back(self, name: str, digest: str) -> LetGo:
        """Make it last that a name means a revision that was pushed."""
        ...

    def erase(self, name: str) -> LetGo:
        """Make it last that a name means nothing."""
        ...

    def discard(self, digest: str) -> None:
        """Delete a revision that nobody runs, unless a name refers to it."""
        ...

    def kept(self, name: str, digest: str, *, whole: bool) -> Kept:
        """What is known of a name and the revision that it means; ``whole``: its manifest too."""
        ...

    def pin(self, name: str, pinned: bool) -> LetGo:
        """Make it last that a name is pinned, or not."""
        ...

    def hold(self, name: str, held: bool) -> LetGo:
        """Make it last that a name takes no new requests, or takes them again."""
        ...


class CallError(ValueError):
    """A call that is refused; ``code`` is for programs."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(slots=True, eq=False)
class Loading:
    """One load on its way."""

    call: LoadAdapter | MoveAdapter | PushAdapter
    name: str
    loaded: Future[Loaded]
    record: Callable[[str, str], LetGo] | None
    """What makes it last; None: it is written back later."""
    revision: AdapterRevision | None = None
    """Once it is read."""
    recorded: Future[LetGo] | None = None
    """Once all ranks have it."""
