"""Where fetched and uploaded files lie until the store has taken them.

    ROOT/fetching/claims/RANDOM/    what somebody is at
    ROOT/fetching/idle/KEY/         what a broken fetch of one address has left, to go on from

Both are directories of one adapter. They change place by renaming, so a directory is never in two
hands. What a dead process was at is idle again when the area is opened.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import Final

from tp_engine.sources.partial import PartialFile, PartialState

MAX_IDLE: Final = 32
"""Directories that are kept for somebody to go on; the oldest go first."""
KEEP_SECONDS: Final = 7 * 24 * 3600.0
"""How long the rest of a fetch is kept for somebody to go on."""


class FetchArea:
    """The directory; one process at a time may use it. Any thread may."""

    def __init__(self, store: Path) -> None:
        """Open the area of a store, or make it."""
        self._lock = threading.Lock()
        self._claims = claims_directory(store)
        self._idle = store / "fetching" / "idle"
        for path in (self._claims, self._idle):
            path.mkdir(parents=True, exist_ok=True)
        for path in self._claims.iterdir():
            Claim(path, self._idle, self._lock).release(keep=True)
        for path in self._idle.iterdir():
            if time.time() - path.stat().st_mtime > KEEP_SECONDS:
                shutil.rmtree(path)

    @property
    def claims(self) -> Path:
        """The directory that claims lie in."""
        return self._claims

    def claim(self, url: str) -> Claim:
        """A directory to fetch ``url`` into, with what an earlier fetch has left in it."""
        claim = self.new_claim()
        with contextlib.suppress(FileNotFoundError):
            # Over the empty directory: one of several fetches gets it, the others begin anew.
            (self._idle / _key(url)).rename(claim.path)
        state = PartialState.read(claim.path)
        if state is None or state.url != url:
            claim.clear()
            PartialState(url=url).write(claim.path)
        return claim

    def new_claim(self) -> Claim:
        """An empty directory."""
        return Claim(Path(tempfile.mkdtemp(dir=self._claims)), self._idle, self._lock)


class Claim:
    """A directory that one fetch or upload has to itself."""

    def __init__(self, path: Path, idle: Path, lock: threading.Lock) -> None:
        self.path = path
        self._idle = idle
        self._lock = lock  # two of one address may be given up at once

    def part(self, name: str, size: int, tag: str | None) -> PartialFile:
        """A file to be fetched; what is there of the same content is kept."""
        return PartialFile(self.path, name, size, tag)

    def clear(self) -> None:
        """Delete all files."""
        for path in self.path.iterdir():
            path.unlink()

    def restart(self) -> None:
        """Delete what was fetched, and remember the address."""
        state = PartialState.read(self.path)
        assert state is not None
        self.clear()
        PartialState(url=state.url).write(self.path)

    def release(self, *, keep: bool) -> None:
        """Give the directory up; ``keep`` what was fetched for the next one who wants it."""
        state = PartialState.read(self.path) if keep else None
        if state is not None and state.files:
            target = self._idle / _key(state.url)
            with self._lock:
                if target.exists():
                    shutil.rmtree(target)
                self.path.rename(target)
                for path in sorted(self._idle.iterdir(), key=_age)[MAX_IDLE:]:
                    shutil.rmtree(path)
        else:
            shutil.rmtree(self.path)


def _age(path: Path) -> float:
    return -path.stat().st_mtime


def claims_directory(store: Path) -> Path:
    """Where in a store's directory what is being fetched lies."""
    return store / "fetching" / "claims"


def _key(url: str) -> str:
    return hashlib.sha256(url.encode()).hexdigest()
