"""Reading through fsspec, the same for every file system that it knows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO, Final

BLOCK_BYTES: Final = 8 << 20
"""Read at a time: one request each."""


def read_blocks(file: IO[bytes], offset: int, size: int) -> Iterator[bytes]:
    """The bytes of an open file from ``offset`` on; ends early where the file does."""
    file.seek(offset)
    while offset < size:
        block = file.read(min(BLOCK_BYTES, size - offset))
        if not block:
            return
        offset += len(block)
        yield block
