"""What the fleet has others do, and what it remembers of it meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tp_engine.adapters import AdapterImage, AdapterRevision
from tp_engine.adapters.store import Hold
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
    """What is slow. A ValueError refuses the call and says why.

    Two other threads call the methods, each in the order of the calls, so that what takes no time
    does not wait for what does. The reader's has what revisions hold, the recorder's names:

        reader      load, load_kept, load_pushed, write_back, settled, discard, drop
        recorder    which, record, record_pushed, roll_back, erase, pin, hold, kept

    Between them one order is kept: what is loaded is not discarded before `settled` says that it
    has its name, or will not get one.
    """

    @property
    def left_out(self) -> Mapping[str, LeftOut]:
        """Names that the store knows and that are not served."""
        ...

    def load(self, directory: Path, source: str = "") -> Loaded:
        """Keep, read, check, cut and pack an adapter; ``source`` is where it was fetched from."""
        ...

    def load_kept(self, digest: str) -> Loaded:
        """Read and pack a revision of the store."""
        ...

    def load_pushed(self, directory: Path) -> Loaded:
        """Read, check, cut and pack what was pushed; the directory is the loader's from now on."""
        ...

    def write_back(self, digest: str, record: Callable[[], LetGo]) -> LetGo:
        """Keep a revision that was pushed; ``record`` makes it last that a name means it."""
        ...

    def settled(self, digest: str) -> None:
        """What was loaded has its name, or will not get one."""
        ...

    def discard(self, digest: str) -> None:
        """Delete a revision that nobody runs, unless a name refers to it."""
        ...

    def drop(self, directory: Path) -> None:
        """Delete what was pushed and refused unread."""
        ...

    def which(self, name: str, revision: str | None) -> str:
        """The digest of a revision of the store, named by that or, of the name's own, its first
        digits; None: the one before the name's last move."""
        ...

    def record(self, name: str, digest: str) -> LetGo:
        """Make it last that a name means a revision."""
        ...

    def record_pushed(self, name: str, digest: str) -> LetGo:
        """Likewise a revision that was pushed and is kept: the next one takes its place."""
        ...

    def roll_back(self, name: str, digest: str) -> LetGo:
        """Make it last that a name means what it meant before its last move, this revision."""
        ...

    def erase(self, name: str) -> LetGo:
        """Make it last that a name means nothing."""
        ...

    def kept(self, name: str, digest: str, *, whole: bool) -> Kept:
        """What is known of a name and the revision that it means; ``whole``: its manifest too."""
        ...

    def pin(self, name: str, pinned: bool) -> LetGo:
        """Make it last that a name is pinned, or not."""
        ...

    def hold(self, name: str, hold: Hold) -> LetGo:
        """Make it last whether a name takes new requests, and whether it is about to go."""
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
