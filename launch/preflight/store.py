"""Check of the adapter store: one server at a time uses it."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import BinaryIO

from launch.preflight.errors import PreflightError

_LOCK = "lock"


def claim_store(directory: Path) -> BinaryIO:
    """Take an adapter store, until what comes back is closed or this process ends, however it does.

    Of two servers each would delete what the other is writing, and not know what it has named.

    Raises:
        PreflightError: another server has it, or it cannot be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = (directory / _LOCK).open("ab")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise PreflightError(
            f"--adapter-store {directory} is in use by another server: wait for its end, or give "
            f"this one a directory of its own"
        ) from None
    except OSError as error:
        raise PreflightError(f"--adapter-store {directory} can't be used: {error}") from error
    return file
