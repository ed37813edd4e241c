"""What the fleet has the store do, by two threads: see `tp_engine.fleet.errands.Loader`."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from tp_engine.adapters import AdapterRevision
from tp_engine.adapters.errors import shown
from tp_engine.adapters.store import AdapterStore, Flags, Hold, StoreError
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
        self._put_off: dict[str, Flags] = {}
        """What has been asked of names that the store does not know yet."""

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
        return [] if self._store is None else self._promote(self._store, name, digest)

    def record_pushed(self, name: str, digest: str) -> LetGo:
        """Likewise a revision that was pushed and is kept: the next one takes its place."""
        return self._promote(self._need_store(), name, digest, pushed=True)

    def roll_back(self, name: str, digest: str) -> LetGo:
        """Make it last that a name means what it meant before its last move, this revision."""
        moved = self._need_store().roll_back(name)
        assert moved.digest == digest
        self._take_in(name)
        return []

    def write_back(self, digest: str, record: Callable[[], LetGo]) -> LetGo:
        """Keep a revision that was pushed; ``record`` makes it last that a name means it.

        Raises:
            AdapterError: its files are not what they were.
            OSError: the store cannot be written.
        """
        store, directory = self._need_store(), self._pushed.find(digest)
        if directory is not None:
            store.add(directory, self.read, source=PUSHED)
        let_go = record()
        self._pushed.drop(digest)
        return let_go

    def erase(self, name: str) -> LetGo:
        """Make it last that a name means nothing."""
        self._put_off.pop(name, None)
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
        history = [move.digest for move in self._store.moves(name)]
        try:
            found = self._store.revision(digest).manifest
        except StoreError:  # as yet, or any more
            return Kept(history=history, base=self._store.base_digest)
        manifest = msgspec.to_builtins(found) if whole else None
        return Kept(history=history, on_disk=True, base=found.base_digest, manifest=manifest)

    def which(self, name: str, revision: str | None) -> str:
        """The digest of a revision: ``revision`` itself, or what a name has meant and begins so;
        None: what it meant before its last move.

        Raises:
            StoreError: there is no store, no such revision, or ``revision`` may be each of several.
        """
        store = self._need_store()
        if revision is None:
            return store.earlier(name)
        if store.has(revision):
            return revision
        if len(revision) < FIRST_DIGITS:
            reason = f"must be a digest or at least its first {FIRST_DIGITS} digits"
            raise StoreError("unknown_revision", f"revision {shown(revision)} {reason}")
        past = {move.digest for move in store.moves(name, undone=True)}
        found = sorted(digest for digest in past if digest.startswith(revision))
        if not found:
            reason = f"is not in the store, and adapter {shown(name)} has had none that begins so"
            raise StoreError("unknown_revision", f"revision {shown(revision)} {reason}")
        if len(found) > 1:
            reason = f"may be each of {', '.join(found)}: more digits are needed"
            raise StoreError("ambiguous_revision", f"revision {shown(revision)} {reason}")
        return found[0]

    def pin(self, name: str, pinned: bool) -> LetGo:
        """Make it last that a name is pinned, or not."""
        if self._store is not None and self._store.knows(name):
            self._store.pin(name, pinned)
        else:
            self._put_off.setdefault(name, {})["pinned"] = pinned
        return []

    def hold(self, name: str, hold: Hold) -> LetGo:
        """Make it last whether a name takes new requests, and whether it is about to go."""
        if self._store is not None and self._store.knows(name):
            self._store.hold(name, hold)
        else:
            self._put_off.setdefault(name, {})["hold"] = hold
        return []

    def _promote(
        self, store: AdapterStore, name: str, digest: str, *, pushed: bool = False
    ) -> LetGo:
        let_go = store.promote(name, digest, pushed=pushed, flags=self._put_off.get(name))
        self._put_off.pop(name, None)
        self._take_in(name)
        return let_go

    def _take_in(self, name: str) -> None:
        """A name is left out no more. The loop may be looking: what it sees never changes."""
        self.left_out = {each: left for each, left in self.left_out.items() if each != name}

    def _need_store(self) -> AdapterStore:
        if self._store is None:
            raise StoreError("no_store", "the server was started without --adapter-store")
        return self._store
