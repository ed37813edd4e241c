"""The adapter store: revisions by digest, names that move between them, files that last."""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from tp_engine.adapters.config import CONFIG_NAME
from tp_engine.adapters.errors import shown
from tp_engine.adapters.reader import WEIGHTS_NAME
from tp_engine.adapters.revision import AdapterRevision
from tp_engine.adapters.size import ImageSize
from tp_engine.adapters.store.errors import StoreError
from tp_engine.adapters.store.files import RevisionFiles, sha256_of
from tp_engine.adapters.store.index import Alias, Move, RevisionRow, RevisionState, StoreIndex
from tp_engine.adapters.store.manifest import Manifest, manifest_of
from tp_engine.adapters.store.names import Flags, Hold

log = logging.getLogger(__name__)

FILES: Final = (CONFIG_NAME, WEIGHTS_NAME)
"""Of a revision."""


class AdapterStore:
    """Everything about adapters that survives a restart. Any thread may use it."""

    def __init__(self, root: Path, *, base_digest: str, architecture: str, vocab_size: int) -> None:
        """Open a store, or make one, and sweep away what a dead process left half done.

        Args:
            root: a directory of its own; one process at a time may use it.
            base_digest: of the base that revisions are checked against.
            architecture: of that base.
            vocab_size: of that base.

        Raises:
            ValueError: another version of this program wrote it.
        """
        root.mkdir(parents=True, exist_ok=True)
        self.base_digest = base_digest
        self._base = (base_digest, architecture, vocab_size)
        self._lock = threading.Lock()
        self._files = RevisionFiles(root)
        self._index = StoreIndex(root / "index.sqlite")
        for alias in self._index.aliases():
            if alias.hold is Hold.LEAVING:  # the requests that it waited for are gone
                self._index.unname(alias.name)
                log.info("adapter %s was drained to be removed: it is unloaded", shown(alias.name))
        for digest in self._index.unreferred():  # let go, or still without a name when it died
            self._index.forget(digest)
        self._files.sweep(self._index.digests())
        for row in self._index.revisions():
            self._look_over(row)

    def close(self) -> None:
        """Close the index."""
        self._index.close()

    # --- revisions ---------------------------------------------------------------------------

    def add(
        self,
        directory: Path,
        read: Callable[[Path], AdapterRevision],
        *,
        source: str | None = None,
    ) -> tuple[AdapterRevision, RevisionRow]:
        """Copy an adapter's files, read and check the copy, and keep it.

        What is checked is what is kept, whatever happens to the directory meanwhile. When this
        returns, the revision survives a loss of power as soon as a name means it; without one it
        goes at the next opening. One that is ready already stays as it is.

        Args:
            directory: of the two files, resolved.
            read: reads and checks the adapter in a directory.
            source: where it came from, if not from there.

        Raises:
            AdapterError: it is refused; nothing is kept.
            OSError: its files cannot be read, or the store cannot be written.
        """
        with self._files.staged({name: directory / name for name in FILES}) as staged:
            revision = replace(read(staged.path), source=source or str(directory))
            with self._lock:
                row = self._index.revision(revision.digest)
                if row is None or row.state is not RevisionState.READY:
                    self._files.place(staged, revision.digest)
                    self._index.add(self._manifest(revision, staged.sums))
        return revision, self.revision(revision.digest)

    def revision(self, digest: str) -> RevisionRow:
        """A revision.

        Raises:
            StoreError: ``unknown_revision``.
        """
        row = self._index.revision(digest)
        if row is None:
            raise StoreError("unknown_revision", f"revision {shown(digest)} is not registered")
        return row

    def has(self, digest: str) -> bool:
        """Whether a revision is registered, in whatever state."""
        return self._index.revision(digest) is not None

    def is_whole(self, digest: str) -> bool:
        """Whether a revision is registered and, as far as is known, not damaged."""
        row = self._index.revision(digest)
        return row is not None and row.state is not RevisionState.FAILED

    def revisions(self) -> list[RevisionRow]:
        """All revisions, in the order of their digests."""
        return self._index.revisions()

    def keep_size(self, digest: str, layout: str, size: ImageSize) -> None:
        """Remember what a revision takes in memory when it is served in one way."""
        self._index.keep_size(digest, layout, size)

    def sizes(self, layout: str) -> dict[str, ImageSize]:
        """What revisions take in memory when they are served so, as far as known, by digest."""
        return self._index.sizes(layout)

    def unchecked_directory(self, digest: str) -> Path:
        """As `directory`, for who checks what it reads by the revision's digest.

        Raises:
            StoreError: ``unknown_revision`` or ``not_ready``.
        """
        self.check_whole(digest)
        return self._files.path(digest)

    def directory(self, digest: str) -> Path:
        """The directory of a revision, its files checked against their sums.

        Raises:
            StoreError: ``unknown_revision``, ``not_ready``, or ``damaged`` if a file is not what
                it was; the revision is then marked as failed.
        """
        row = self.check_whole(digest)
        path = self._files.path(digest)
        for name, wanted in row.manifest.files.items():
            found = sha256_of(path / name) if (path / name).is_file() else "nothing"
            if found != wanted:
                reason = f"{name} has SHA-256 {found}, must be {wanted}"
                self._index.set_state(digest, RevisionState.FAILED, reason)
                raise StoreError("damaged", f"revision {digest}: {reason}")
        return path

    def discard(self, digest: str) -> None:
        """Forget a revision and delete its files, if no name means it or could go back to it.

        Whoever runs it must have let go of it.
        """
        with self._lock:
            hidden = self._files.hide(digest) if self._forget_unreferred(digest) else None
        if hidden is not None:
            shutil.rmtree(hidden)  # names move meanwhile

    # --- names -------------------------------------------------------------------------------

    def promote(
        self, name: str, digest: str, *, pushed: bool = False, flags: Flags | None = None
    ) -> list[str]:
        """Let a name mean a revision from now on; the one before can be rolled back to.

        Args:
            pushed: whether the next pushed one takes its place, so that it cannot be rolled back
                to then.
            flags: of a name that is new.

        Returns:
            The revisions that nothing refers to any more, to `discard` when nobody runs them.

        Raises:
            StoreError: ``unknown_revision`` or ``not_ready``.
        """
        with self._lock:
            self.check_whole(digest)
            return self._index.move(name, digest, pushed=pushed, flags=flags or {})

    def earlier(self, name: str) -> str:
        """The revision that a name meant before its last move.

        Raises:
            StoreError: ``unknown_name``; ``nothing_before`` if it never meant anything else;
                ``not_ready`` if that revision cannot be served any more.
        """
        self.alias(name)
        past = self._index.moves(name)
        if len(past) < 2:
            raise StoreError("nothing_before", f"adapter {shown(name)} has no earlier revision")
        return self.check_whole(past[1].digest).manifest.digest

    def roll_back(self, name: str) -> Alias:
        """Let a name mean what it meant before its last move.

        Raises:
            StoreError: as `earlier`.
        """
        with self._lock:
            self.earlier(name)
            self._index.undo_move(name)
            return self.alias(name)

    def unname(self, name: str) -> list[str]:
        """Let a name mean nothing; the revisions that nothing refers to any more.

        Raises:
            StoreError: ``unknown_name``.
        """
        with self._lock:
            self.alias(name)
            return self._index.unname(name)

    def pin(self, name: str, pinned: bool) -> Alias:
        """Ask that what a name means is kept in memory, or no longer.

        Raises:
            StoreError: ``unknown_name``.
        """
        with self._lock:
            self.alias(name)
            self._index.pin(name, pinned)
            return self.alias(name)

    def hold(self, name: str, hold: Hold) -> Alias:
        """Say whether a name takes new requests; one that leaves is gone at the next opening.

        Raises:
            StoreError: ``unknown_name``.
        """
        with self._lock:
            self.alias(name)
            self._index.hold(name, hold)
            return self.alias(name)

    def alias(self, name: str) -> Alias:
        """What a name means.

        Raises:
            StoreError: ``unknown_name``.
        """
        alias = self._index.alias(name)
        if alias is None:
            raise StoreError("unknown_name", f"adapter {shown(name)} is not registered")
        return alias

    def knows(self, name: str) -> bool:
        """Whether a name means anything."""
        return self._index.alias(name) is not None

    def aliases(self) -> list[Alias]:
        """All names, in their order."""
        return self._index.aliases()

    def moves(self, name: str, *, undone: bool = False) -> list[Move]:
        """A name's moves, the last one first; ``undone``: also those that were rolled back."""
        return self._index.moves(name, undone=undone)

    # -----------------------------------------------------------------------------------------

    def check_whole(self, digest: str) -> RevisionRow:
        """A revision, unless its files are known to be damaged.

        Raises:
            StoreError: ``unknown_revision`` or ``not_ready``.
        """
        row = self.revision(digest)
        if row.state is RevisionState.FAILED:
            raise StoreError("not_ready", f"revision {digest} is failed: {row.reason}")
        return row

    def _forget_unreferred(self, digest: str) -> bool:
        unreferred = not self._index.is_referred_to(digest)
        if unreferred:
            self._index.forget(digest)
        return unreferred

    def _look_over(self, row: RevisionRow) -> None:
        """Mark a revision as failed if its files are gone or cut short."""
        path = self._files.path(row.manifest.digest)
        sizes = [(path / name).stat().st_size for name in FILES if (path / name).is_file()]
        if row.state is RevisionState.READY and sum(sizes) != row.manifest.file_bytes:
            reason = f"its files have {sum(sizes)} bytes, must be {row.manifest.file_bytes}"
            log.error("adapter revision %s: %s", row.manifest.digest, reason)
            self._index.set_state(row.manifest.digest, RevisionState.FAILED, reason)

    def _manifest(self, revision: AdapterRevision, sums: Mapping[str, str]) -> Manifest:
        path = self._files.path(revision.digest)
        size = sum((path / name).stat().st_size for name in sums)
        return manifest_of(revision, self._base, sums, size)
