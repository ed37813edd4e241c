"""What the store refuses."""

from __future__ import annotations

from typing import Literal, get_args

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
