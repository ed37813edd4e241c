"""What can go wrong with a source.

ValueError
└── SourceError       it cannot be had; ``code`` is one of `SourceErrorCode`
Exception
├── SourceBroken      it may work on another try
├── SourceChanged     it is no longer what it was when the fetch began
└── FetchCancelled    nobody wants it any more
"""

from __future__ import annotations

from typing import Literal, get_args

SourceErrorCode = Literal[
    "source_refused",
    "source_missing",
    "source_denied",
    "source_failed",
    "source_changed",
    "too_many_bytes",
    "checksum_mismatch",
    "weights_corrupt",
]
"""Stable words for programs; the message is for people."""


class SourceError(ValueError):
    """An adapter that cannot be fetched; the message names the address and the reason."""

    def __init__(self, code: SourceErrorCode, message: str) -> None:
        assert code in get_args(SourceErrorCode)
        super().__init__(message)
        self.code: SourceErrorCode = code


class SourceBroken(Exception):
    """A connection that broke, a server that is busy: worth another try."""


class SourceChanged(Exception):
    """The content is another one than at the beginning: what was fetched of it is worthless."""


class FetchCancelled(Exception):
    """The fetch was cancelled."""
