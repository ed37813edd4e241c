"""The files of what was pushed, until the store has them.

A push is one safetensors file. Its ``__metadata__`` holds the adapter's configuration, which PEFT
writes to ``adapter_config.json``, as JSON under the key ``adapter_config``.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from sharding import CheckpointError, read_metadata
from tp_engine.adapters import AdapterError
from tp_engine.adapters.config import CONFIG_NAME
from tp_engine.adapters.reader import WEIGHTS_NAME

CONFIG_KEY = "adapter_config"
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


def unpack(directory: Path) -> None:
    """Write the configuration that a pushed file brings beside it, as an adapter has it on disk.

    Raises:
        AdapterError: the file is damaged or brings none.
    """
    try:
        metadata = read_metadata(directory / WEIGHTS_NAME)
    except CheckpointError as error:
        raise AdapterError("weights_corrupt", str(error)) from None
    if CONFIG_KEY not in metadata:
        reason = f"the file's __metadata__ must hold the content of {CONFIG_NAME} as {CONFIG_KEY!r}"
        raise AdapterError("config_missing", reason)
    (directory / CONFIG_NAME).write_text(metadata[CONFIG_KEY], "utf-8")
