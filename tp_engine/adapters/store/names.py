"""Names, and the moves that they made, inside one transaction of the index.

    move           a new move on top; what was rolled back before it is forgotten
    pushed move    takes the place of a pushed move on top, so that a training loop is one move
    undo_move      the top move is set aside, and can be promoted again until the name moves on
    unname         the name and all of its moves go

A revision that no move refers to any more is marked as draining in the same transaction: whoever
runs it discards it when it is done with it, and the next opening of the store does so otherwise. A
move to it before that makes it ready again.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable
from enum import IntEnum
from typing import TypedDict


class Hold(IntEnum):
    """Whether a name takes new requests; as it stands in the index."""

    NONE = 0
    """It does."""
    HELD = 1
    """It does not, until it is resumed."""
    LEAVING = 2
    """It does not, and goes when the requests that it has have ended."""


class Flags(TypedDict, total=False):
    """What is asked of a name beside its meaning."""

    pinned: bool
    hold: Hold


def move(
    db: sqlite3.Connection, name: str, digest: str, *, pushed: bool, flags: Flags
) -> list[str]:
    """Let a name mean a revision from now on; the revisions that nothing refers to any more.

    A move to what the name means already adds none; one that is not pushed makes it lasting.
    A name that is new gets ``flags``.

    Raises:
        sqlite3.IntegrityError: there is no such revision.
    """
    db.execute(
        "INSERT INTO aliases (name, digest, pinned, held) VALUES (?, ?, ?, ?) "
        "ON CONFLICT (name) DO UPDATE SET digest = excluded.digest",
        (name, digest, flags.get("pinned", False), flags.get("hold", Hold.NONE)),
    )
    db.execute(
        "UPDATE revisions SET state = 'ready' WHERE digest = ? AND state = 'draining'", (digest,)
    )
    let_go = _delete(db, "name = ? AND undone", name)
    top = _top(db, name)
    if top is not None and top[1] == digest:
        db.execute("UPDATE moves SET pushed = pushed AND ? WHERE id = ?", (int(pushed), top[0]))
    else:
        if top is not None and pushed and top[2]:
            let_go += _delete(db, "id = ?", top[0])
        db.execute(
            "INSERT INTO moves (name, digest, at, pushed) VALUES (?, ?, ?, ?)",
            (name, digest, time.time(), int(pushed)),
        )
    return _drain_unreferred(db, let_go)


def undo_move(db: sqlite3.Connection, name: str) -> None:
    """Let a name mean what it meant before its last move; it must have moved twice."""
    (last, _), (_, digest) = db.execute(
        "SELECT id, digest FROM moves WHERE name = ? AND NOT undone ORDER BY id DESC LIMIT 2",
        (name,),
    ).fetchall()
    db.execute("UPDATE moves SET undone = 1 WHERE id = ?", (last,))
    db.execute("UPDATE aliases SET digest = ? WHERE name = ?", (digest, name))


def unname(db: sqlite3.Connection, name: str) -> list[str]:
    """Let a name mean nothing; the revisions that nothing refers to any more."""
    db.execute("DELETE FROM aliases WHERE name = ?", (name,))
    return _drain_unreferred(db, _delete(db, "name = ?", name))


def _top(db: sqlite3.Connection, name: str) -> tuple[int, str, int] | None:
    row: tuple[int, str, int] | None = db.execute(
        "SELECT id, digest, pushed FROM moves WHERE name = ? ORDER BY id DESC LIMIT 1", (name,)
    ).fetchone()
    return row


def _delete(db: sqlite3.Connection, where: str, value: object) -> list[str]:
    """Delete moves; their revisions."""
    rows = db.execute(f"DELETE FROM moves WHERE {where} RETURNING digest", (value,)).fetchall()
    return [row[0] for row in rows]


def _drain_unreferred(db: sqlite3.Connection, digests: Iterable[str]) -> list[str]:
    unreferred = []
    for digest in sorted(set(digests)):
        if not db.execute("SELECT 1 FROM moves WHERE digest = ? LIMIT 1", (digest,)).fetchone():
            db.execute("UPDATE revisions SET state = 'draining' WHERE digest = ?", (digest,))
            unreferred.append(digest)
    return unreferred
