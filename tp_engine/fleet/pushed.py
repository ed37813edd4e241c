"""The files of what was pushed, until the store has them."""

from __future__ import annotations

import shutil
from pathlib import Path

PUSHED = "pushed"
"""As the source of a revision."""


class PushedFiles:
    """Directories of files by the revision in them."""

    def __init__(self) -> None:
        """Begin with none."""
        self._directories: dict[str, Path] = {}

    def keep(self, digest: str, directory: Path) -> None:
        """Keep a revision's directory; a second one of the same content is deleted."""
        if self._directories.setdefault(digest, directory) != directory:
            shutil.rmtree(directory)

    def find(self, digest: str) -> Path | None:
        """The directory of a revision that was pushed."""
        return self._directories.get(digest)

    def drop(self, digest: str) -> None:
        """Delete a revision's files if there are any."""
        directory = self._directories.pop(digest, None)
        if directory is not None:
            shutil.rmtree(directory)
