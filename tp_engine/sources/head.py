"""A look at the first bytes of a safetensors file, so that no body is fetched for a broken one.

The whole check is the reader's, once the file is there (`sharding.header`, which needs torch; this
does not). Format: 8 bytes, the little-endian length n of the header, then n bytes of JSON.
"""

from __future__ import annotations

from typing import Final

from tp_engine.sources.errors import SourceError

MAX_HEADER_BYTES: Final = 16 << 20
"""Longest header accepted, as in `sharding.header`."""

_LENGTH_BYTES: Final = 8
_LFS_POINTER: Final = b"version "
"""What a git-lfs pointer begins with."""


class HeadCheck:
    """Watches one file go by."""

    def __init__(self, where: str, size: int) -> None:
        """Watch a file of at most ``size`` bytes; ``where`` is its name in errors."""
        self._where = where
        self._size = size
        self._start = b""

    def feed(self, block: bytes) -> None:
        """Take the next bytes of the file.

        Raises:
            SourceError: ``weights_corrupt``: the header's length cannot be.
        """
        if len(self._start) >= _LENGTH_BYTES:
            return
        self._start += block[: _LENGTH_BYTES - len(self._start)]
        if len(self._start) == _LENGTH_BYTES or self._size < _LENGTH_BYTES:
            self._check()

    def _check(self) -> None:
        if self._start == _LFS_POINTER:
            self._refuse("is a git-lfs pointer, not the file itself")
        if self._size < _LENGTH_BYTES:
            self._refuse(f"has {self._size} bytes, too few for a safetensors file")
        length = int.from_bytes(self._start, "little")
        if length > MAX_HEADER_BYTES:
            self._refuse(f"has a header of {length} bytes; at most {MAX_HEADER_BYTES} are allowed")
        if length > self._size - _LENGTH_BYTES:
            self._refuse(f"has a header of {length} bytes, but {self._size} bytes at most in all")

    def _refuse(self, reason: str) -> None:
        raise SourceError("weights_corrupt", f"{self._where} {reason}")
