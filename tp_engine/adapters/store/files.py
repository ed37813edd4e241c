"""A revision's files on disk, written so that they are there whole or not at all."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_CHUNK: Final = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Staged:
    """Files on their way into the store."""

    path: Path
    """Their directory."""
    sums: Mapping[str, str]
    """SHA-256 of each, in hex, by name."""


class RevisionFiles:
    """Directories named by digest, and a place for what is being written."""

    def __init__(self, root: Path) -> None:
        """Make the directories if they are not there."""
        self._revisions = root / "revisions"
        self._incoming = root / "incoming"
        for path in (self._revisions, self._incoming):
            path.mkdir(parents=True, exist_ok=True)
        sync_directory(root)

    def path(self, digest: str) -> Path:
        """Where the files of a revision lie, or would."""
        return self._revisions / digest

    @contextmanager
    def staged(self, sources: Mapping[str, Path]) -> Iterator[Staged]:
        """Copies of files, by name, in a directory of their own; deleted at the end unless placed.

        Raises:
            OSError: a file cannot be read, or there is no room.
        """
        path = Path(tempfile.mkdtemp(dir=self._incoming))
        try:
            sums = {name: _copy(source, path / name) for name, source in sources.items()}
            sync_directory(path)
            yield Staged(path=path, sums=sums)
        finally:
            if path.exists():
                shutil.rmtree(path)

    def place(self, staged: Staged, digest: str) -> None:
        """Let staged files be those of a revision, in place of any that are there."""
        self.remove(digest)
        staged.path.rename(self.path(digest))
        sync_directory(self._revisions)

    def remove(self, digest: str) -> None:
        """Delete a revision's files if they are there: at once out of sight, then byte by byte."""
        hidden = self.hide(digest)
        if hidden is not None:
            shutil.rmtree(hidden)

    def hide(self, digest: str) -> Path | None:
        """Take a revision's files out of sight if they are there; the directory to be deleted."""
        path = self.path(digest)
        if not path.exists():
            return None
        doomed = Path(tempfile.mkdtemp(dir=self._incoming))
        path.rename(doomed / "removed")
        sync_directory(self._revisions)
        return doomed

    def sweep(self, keep: Iterable[str]) -> None:
        """Delete everything but the revisions in ``keep``."""
        kept = set(keep)
        for path in self._revisions.iterdir():
            if path.name not in kept:
                self.remove(path.name)
        for path in self._incoming.iterdir():
            shutil.rmtree(path)


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_directory(path: Path) -> None:
    """Make the entries of a directory survive a loss of power."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _copy(source: Path, target: Path) -> str:
    sha = hashlib.sha256()
    with source.open("rb") as reader, target.open("xb") as writer:
        while chunk := reader.read(_CHUNK):
            sha.update(chunk)
            writer.write(chunk)
        writer.flush()
        os.fsync(writer.fileno())
    return sha.hexdigest()
