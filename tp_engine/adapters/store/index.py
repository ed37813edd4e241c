"""The index of an adapter store: one SQLite file, every change one transaction.

A name (alias) means one revision; each move of it is kept, so that it can be rolled back.

Legend: move = a name beginning to mean another revision.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

import msgspec

from tp_engine.adapters.size import ImageSize
from tp_engine.adapters.store import footprints, names
from tp_engine.adapters.store.errors import disk_errors
from tp_engine.adapters.store.manifest import Manifest
from tp_engine.adapters.store.names import Flags, Hold

SCHEMA_VERSION: Final = 2
"""Kept as SQLite's ``user_version``."""
_SCHEMA: Final = """
CREATE TABLE revisions (
    digest TEXT PRIMARY KEY,
    state TEXT NOT NULL,
    reason TEXT,
    manifest BLOB NOT NULL,
    added REAL NOT NULL
) STRICT;
CREATE TABLE aliases (
    name TEXT PRIMARY KEY,
    digest TEXT NOT NULL REFERENCES revisions (digest),
    pinned INTEGER NOT NULL DEFAULT 0,
    held INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE INDEX aliases_by_digest ON aliases (digest);
CREATE TABLE moves (
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL,
    digest TEXT NOT NULL REFERENCES revisions (digest),
    at REAL NOT NULL,
    pushed INTEGER NOT NULL,
    undone INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE INDEX moves_by_name ON moves (name, id);
CREATE INDEX moves_by_digest ON moves (digest);
"""


class RevisionState(StrEnum):
    """Where a revision stands in its life."""

    READY = "ready"
    DRAINING = "draining"
    """No name refers to it any more; requests that run may still need it."""
    FAILED = "failed"
    """Its files are not what they were; see the reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RevisionRow:
    """A revision and its state."""

    manifest: Manifest
    state: RevisionState
    reason: str | None
    """Why it failed."""
    added: float
    """Seconds since the epoch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Alias:
    """A name and what it means."""

    name: str
    digest: str
    pinned: bool
    """Kept in memory even when idle."""
    hold: Hold


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """One move of a name."""

    digest: str
    at: float
    """Seconds since the epoch."""
    pushed: bool
    """Made by a training loop: the next one takes its place."""


class StoreIndex:
    """Revisions, names and their moves. Any thread may use it."""

    def __init__(self, path: Path) -> None:
        """Open the file, or make it.

        Raises:
            ValueError: another version of this program wrote it.
        """
        self._lock, self._look_lock = threading.Lock(), threading.Lock()
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        for pragma in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON"):
            self._db.execute(f"PRAGMA {pragma}")
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version not in (0, SCHEMA_VERSION):
            self._db.close()
            raise ValueError(
                f"{path} has schema version {version}; this program reads {SCHEMA_VERSION}"
            )
        if version == 0:
            # The version is part of the transaction: a half-made index does not exist.
            self._db.executescript(
                f"BEGIN; {_SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;"
            )
        self._db.execute(footprints.SCHEMA)
        self._looking = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._looking.execute("PRAGMA query_only = 1")

    def close(self) -> None:
        """Close the file; nothing is lost."""
        with self._look_lock:
            self._looking.close()
        with self._lock:
            self._db.close()

    # --- revisions ---------------------------------------------------------------------------

    def add(self, manifest: Manifest) -> None:
        """Enter a revision whose files are in place, ready to be named; again: ready again."""
        values = (manifest.digest, RevisionState.READY, msgspec.json.encode(manifest), time.time())
        with self._change() as db:
            db.execute(
                "INSERT INTO revisions (digest, state, manifest, added) VALUES (?, ?, ?, ?) "
                "ON CONFLICT (digest) DO UPDATE SET state = excluded.state, reason = NULL, "
                "manifest = excluded.manifest",
                values,
            )

    def set_state(self, digest: str, state: RevisionState, reason: str | None = None) -> None:
        """Move a revision to another state."""
        with self._change() as db:
            db.execute(
                "UPDATE revisions SET state = ?, reason = ? WHERE digest = ?",
                (state, reason, digest),
            )

    def forget(self, digest: str) -> None:
        """Take a revision that no name means out of the index, and out of the names' pasts.

        Raises:
            sqlite3.IntegrityError: a name means it.
        """
        with self._change() as db:
            db.execute("DELETE FROM moves WHERE digest = ?", (digest,))
            db.execute("DELETE FROM revisions WHERE digest = ?", (digest,))

    def revision(self, digest: str) -> RevisionRow | None:
        """A revision, or None."""
        rows = self._rows("WHERE digest = ?", (digest,))
        return rows[0] if rows else None

    def revisions(self) -> list[RevisionRow]:
        """All revisions, in the order of their digests."""
        return self._rows("ORDER BY digest", ())

    def digests(self) -> list[str]:
        """All digests."""
        with self._look() as db:
            return [row[0] for row in db.execute("SELECT digest FROM revisions")]

    def keep_size(self, digest: str, layout: str, size: ImageSize) -> None:
        """Remember what a revision takes in memory."""
        with self._change() as db:
            footprints.keep(db, digest, layout, size)

    def sizes(self, layout: str) -> dict[str, ImageSize]:
        """What revisions take in memory, as far as known, by digest."""
        with self._look() as db:
            return footprints.all_of(db, layout)

    # --- names -------------------------------------------------------------------------------

    def move(self, name: str, digest: str, *, pushed: bool, flags: Flags) -> list[str]:
        """See `tp_engine.adapters.store.names.move`."""
        with self._change() as db:
            return names.move(db, name, digest, pushed=pushed, flags=flags)

    def undo_move(self, name: str) -> None:
        """See `tp_engine.adapters.store.names.undo_move`."""
        with self._change() as db:
            names.undo_move(db, name)

    def unname(self, name: str) -> list[str]:
        """See `tp_engine.adapters.store.names.unname`."""
        with self._change() as db:
            return names.unname(db, name)

    def pin(self, name: str, pinned: bool) -> None:
        """Keep what a name means in memory, or no longer."""
        with self._change() as db:
            db.execute("UPDATE aliases SET pinned = ? WHERE name = ?", (int(pinned), name))

    def hold(self, name: str, hold: Hold) -> None:
        """Say whether a name takes new requests."""
        with self._change() as db:
            db.execute("UPDATE aliases SET held = ? WHERE name = ?", (int(hold), name))

    def alias(self, name: str) -> Alias | None:
        """What a name means, or None."""
        found = self._aliases("WHERE name = ?", (name,))
        return found[0] if found else None

    def aliases(self) -> list[Alias]:
        """All names, in their order."""
        return self._aliases("ORDER BY name", ())

    def is_referred_to(self, digest: str) -> bool:
        """Whether a name means a revision or could be rolled back to it."""
        with self._look() as db:
            row = db.execute(
                "SELECT EXISTS (SELECT 1 FROM moves WHERE digest = ?)", (digest,)
            ).fetchone()
        return bool(row[0])

    def unreferred(self) -> list[str]:
        """Revisions that no name means or could go back to."""
        with self._look() as db:
            query = "SELECT digest FROM revisions WHERE digest NOT IN (SELECT digest FROM moves)"
            return [row[0] for row in db.execute(query)]

    def moves(self, name: str, *, undone: bool = False) -> list[Move]:
        """A name's moves, the last one first; ``undone``: also those that were rolled back."""
        with self._look() as db:
            rows = db.execute(
                "SELECT digest, at, pushed FROM moves WHERE name = ? AND undone <= ? "
                "ORDER BY id DESC",
                (name, int(undone)),
            ).fetchall()
        return [Move(digest=digest, at=at, pushed=bool(pushed)) for digest, at, pushed in rows]

    # -----------------------------------------------------------------------------------------

    @contextmanager
    def _change(self) -> Iterator[sqlite3.Connection]:
        """One transaction: all of it is on disk when this ends, or none of it ever is."""
        with self._lock, disk_errors():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:  # SQLite ends some itself when the disk fails
                    self._db.execute("ROLLBACK")
                raise

    @contextmanager
    def _look(self) -> Iterator[sqlite3.Connection]:
        """What has been committed; a look does not wait until a change is on disk."""
        with self._look_lock, disk_errors():
            yield self._looking

    def _rows(self, where: str, values: tuple[object, ...]) -> list[RevisionRow]:
        query = f"SELECT manifest, state, reason, added FROM revisions {where}"
        with self._look() as db:
            return [
                RevisionRow(
                    manifest=msgspec.json.decode(manifest, type=Manifest),
                    state=RevisionState(state),
                    reason=reason,
                    added=added,
                )
                for manifest, state, reason, added in db.execute(query, values)
            ]

    def _aliases(self, where: str, values: tuple[object, ...]) -> list[Alias]:
        with self._look() as db:
            rows = db.execute(
                f"SELECT name, digest, pinned, held FROM aliases {where}", values
            ).fetchall()
        return [Alias(name=n, digest=d, pinned=bool(p), hold=Hold(h)) for n, d, p, h in rows]
