"""What the fleet has the store do; every method is called in the reader's thread."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Final

import msgspec

from tp_engine.adapters import AdapterRevision
from tp_engine.adapters.errors import shown
from tp_engine.adapters.store import AdapterStore, StoreError
from tp_engine.fleet.errands import Kept, LeftOut, LetGo
from tp_engine.fleet.pushed import PUSHED, PushedFiles

FIRST_DIGITS: Final = 12
"""Of a revision, the fewest that stand for it."""


class Keeper:
    """Half of `tp_engine.fleet.errands.Loader`: names and revisions that last.

    Without a store nothing lasts, and names cannot be moved back.
    """

    def __init__(self, store: AdapterStore | None) -> None:
        """Work with a store, or none."""
        self._store = store
        self._pushed = PushedFiles()
        self.left_out: dict[str, LeftOut] = {}
        self._loaded: Counter[str] = Counter()
        """Revisions that are loaded and may get a name: they are not discarded."""

    def read(self, directory: Path) -> AdapterRevision:
        """Read and check an adapter."""
        raise NotImplementedError

    def settled(self, digest: str) -> None:
        """What was loaded has its name, or will not get one."""
        self._loaded[digest] -= 1
        if not self._loaded[digest]:
            del self._loaded[digest]

    def record(self, name: str, digest: str) -> LetGo:
        """Make it last that a name means a revision."""
        let_go = [] if self._store is None else self._store.promote(name, digest)
        self._take_in(name)
        return let_go

    def roll_back(self, name: str, digest: str) -> LetGo:
        """Make it last that a name means what it meant before its last move, this revision."""
        moved = self._need_store().roll_back(name)
        assert moved.digest == digest
        self._take_in(name)
        return []

    def write_back(self, name: str, digest: str) -> LetGo:
        """Make it last that a name means a revision that was pushed.

        Raises:
            AdapterError: its files are not what they were.
            OSError: the store cannot be written.
        """
        store, directory = self._need_store(), self._pushed.find(digest)
        if directory is not None:
            store.add(directory, self.read, source=PUSHED)
        let_go = store.promote(name, digest, pushed=True)
        self._pushed.drop(digest)
        self._take_in(name)
        return let_go

    def erase(self, name: str) -> LetGo:
        """Make it last that a name means nothing."""
        if self._store is None or not self._store.knows(name):
            return []
        let_go = self._store.unname(name)
        self._take_in(name)
        return let_go

    def discard(self, digest: str) -> None:
        """Delete a revision that nobody runs, unless a name refers to it or may get it."""
        if self._loaded[digest]:
            return
        self._pushed.drop(digest)
        if self._store is not None:
            self._store.discard(digest)

    def drop(self, directory: Path) -> None:
        """Delete what was pushed and refused unread."""
        shutil.rmtree(directory)

    def kept(self, name: str, digest: str, *, whole: bool) -> Kept:
        """What is known of a name and the revision that it means; ``whole``: its manifest too."""
        if self._store is None:
            return Kept(history=[])
        base, manifest = self._store.base_digest, None
        on_disk = self._store.has(digest)
        if on_disk:
            found = self._store.revision(digest).manifest
            base, manifest = found.base_digest, msgspec.to_builtins(found) if whole else None
        history = [move.digest for move in self._store.moves(name)]
        return Kept(history=history, on_disk=on_disk, base=base, manifest=manifest)

    def find_revision(self, name: str, text: str) -> str:
        """The digest of a revision: ``text`` itself, or what a name has meant and begins so.

        Raises:
            StoreError: there is no store; ``unknown_revision`` or ``ambiguous_revision``.
        """
        store = self._need_store()
        if store.has(text):
            return text
        if len(text) < FIRST_DIGITS:
            reason = f"must be a digest or at least its first {FIRST_DIGITS} digits"
            raise StoreError("unknown_revision", f"revision {shown(text)} {reason}")
        past = {move.digest for move in store.moves(name, undone=True)}
        found = sorted(digest for digest in past if digest.startswith(text))
        if not found:
            reason = f"is not in the store, and adapter {shown(name)} has had none that begins so"
            raise StoreError("unknown_revision", f"revision {shown(text)} {reason}")
        if len(found) > 1:
            reason = f"may be each of {', '.join(found)}: more digits are needed"
            raise StoreError("ambiguous_revision", f"revision {shown(text)} {reason}")
        return found[0]

    def pin(self, name: str, pinned: bool) -> LetGo:
        """Make it last that a name is pinned, or not."""
        if self._store is not None and self._store.knows(name):
            self._store.pin(name, pinned)
        return []

    def hold(self, name: str, held: bool) -> LetGo:
        """Make it last that a name takes no new requests, or takes them again."""
        if self._store is not None and self._store.knows(name):
            self._store.hold(name, held)
        return []

    def _take_in(self, name: str) -> None:
        """A name is left out no more. The loop may be looking: what it sees never changes."""
        self.left_out = {each: left for each, left in self.left_out.items() if each != name}

    def _need_store(self) -> AdapterStore:
        if self._store is None:
            raise StoreError("no_store", "the server was started without --adapter-store")
        return self._store
