"""What the store refuses."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

import msgspec

StoreErrorCode = Literal[
    "unknown_name",
    "unknown_revision",
    "ambiguous_revision",
    "not_ready",
    "nothing_before",
    "damaged",
    "no_store",
]


class StoreError(ValueError):
    """Something that the store refuses; ``code`` is one of `StoreErrorCode`."""

    def __init__(self, code: StoreErrorCode, message: str) -> None:
        assert code in get_args(StoreErrorCode)
        super().__init__(message)
        self.code: StoreErrorCode = code


@contextmanager
def disk_errors() -> Iterator[None]:
    """Of the index: what the disk does is an OSError, as for files."""
    try:
        yield
    except (sqlite3.DatabaseError, msgspec.DecodeError) as error:
        if isinstance(error, sqlite3.IntegrityError | sqlite3.ProgrammingError):
            raise
        raise OSError(f"the index of the adapter store: {error}") from error
