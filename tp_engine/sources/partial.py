"""Files that are there in part, with what it takes to go on with them.

Beside the files lies ``state.json``: of each the size and tag that the source gave, and how many
bytes are on disk for sure. Whatever a process dies of, those bytes are the source's.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

STATE_NAME: Final = "state.json"
SYNC_BYTES: Final = 64 << 20
"""Fetched between two syncs."""
_READ_BYTES: Final = 1 << 20


class PartState(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one file."""

    size: int
    tag: str | None
    durable: int
    """Bytes on disk for sure."""


class PartialState(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one directory."""

    url: str
    files: dict[str, PartState] = {}

    @classmethod
    def read(cls, directory: Path) -> PartialState | None:
        """The state of a directory, None if it has none that can be read."""
        try:
            return msgspec.json.decode((directory / STATE_NAME).read_bytes(), type=cls)
        except (OSError, msgspec.DecodeError):
            return None

    def write(self, directory: Path) -> None:
        """Keep this: wholly, or what was there stays."""
        scratch = directory / f"{STATE_NAME}.new"
        with scratch.open("wb") as file:
            file.write(msgspec.json.encode(self))
            file.flush()
            os.fsync(file.fileno())
        scratch.rename(directory / STATE_NAME)


class PartialFile:
    """One file as it grows. Use as a context manager: at the end it is synced and closed."""

    def __init__(self, directory: Path, name: str, size: int, tag: str | None) -> None:
        """Open a file that will have ``size`` bytes; what is there is kept if ``tag`` says that
        it is of the same content, else it begins anew."""
        self._directory = directory
        self._name = name
        self._size, self._tag = size, tag
        state = self._state()
        known = state.files.get(name)
        same = known is not None and tag is not None and (known.size, known.tag) == (size, tag)
        path = directory / name
        # A process may have died while it deleted all this.
        same = same and known is not None and _size_of(path) >= known.durable
        self._file = path.open("r+b" if same else "w+b")
        self.done = known.durable if known is not None and same else 0
        """Bytes that are there."""
        self._file.truncate(self.done)
        self._file.seek(self.done)
        self._unsynced = 0
        self._sha = hashlib.sha256()

    def __enter__(self) -> PartialFile:
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            self._sync()
        finally:
            self._file.close()

    def replay(self, look: Callable[[bytes], None]) -> None:
        """Let ``look`` see the bytes that are there already, in blocks; take them into the sum."""
        self._file.seek(0)
        while block := self._file.read(_READ_BYTES):
            look(block)
            self._sha.update(block)

    def write(self, block: bytes) -> None:
        """Add the next bytes."""
        self._file.write(block)
        self._sha.update(block)
        self.done += len(block)
        self._unsynced += len(block)
        if self._unsynced >= SYNC_BYTES:
            self._sync()

    def restart(self) -> None:
        """Begin anew."""
        self._file.seek(0)
        self._file.truncate()
        self._sha = hashlib.sha256()
        self.done = 0
        self._sync()

    def sha256(self) -> str:
        """Of all bytes, in hex."""
        return self._sha.hexdigest()

    def _state(self) -> PartialState:
        state = PartialState.read(self._directory)
        assert state is not None
        return state

    def _sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        part = PartState(size=self._size, tag=self._tag, durable=self.done)
        state = self._state()
        msgspec.structs.replace(state, files={**state.files, self._name: part}).write(
            self._directory
        )
        self._unsynced = 0


def _size_of(path: Path) -> int:
    """In bytes; negative if there is no such file."""
    return path.stat().st_size if path.is_file() else -1
