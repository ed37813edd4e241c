"""What revisions take in memory, so that a start need not read them to know.

It depends on how a base is cut and served, which ``layout`` stands for; what is missing is found by
reading the revision, so this may be lost.
"""

from __future__ import annotations

import sqlite3
from typing import Final

from tp_engine.adapters.size import ImageSize

SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS image_sizes (
    digest TEXT NOT NULL REFERENCES revisions (digest) ON DELETE CASCADE,
    layout TEXT NOT NULL,
    pages INTEGER NOT NULL,
    words INTEGER NOT NULL,
    max_rank INTEGER NOT NULL,
    traits INTEGER NOT NULL,
    row_bytes INTEGER NOT NULL,
    PRIMARY KEY (digest, layout)
) STRICT, WITHOUT ROWID
"""


def keep(db: sqlite3.Connection, digest: str, layout: str, size: ImageSize) -> None:
    """Remember a revision's size, if the revision is there."""
    db.execute(
        "INSERT OR REPLACE INTO image_sizes SELECT digest, ?, ?, ?, ?, ?, ? FROM revisions "
        "WHERE digest = ?",
        (layout, *size, digest),
    )


def all_of(db: sqlite3.Connection, layout: str) -> dict[str, ImageSize]:
    """Sizes that are known, by digest."""
    rows = db.execute(
        "SELECT digest, pages, words, max_rank, traits, row_bytes "
        "FROM image_sizes WHERE layout = ?",
        (layout,),
    )
    return {digest: ImageSize(*size) for digest, *size in rows}
