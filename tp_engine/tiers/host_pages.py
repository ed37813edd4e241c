"""A rank's host memory for adapters: page images and records, ready to be copied to the arena."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tp_engine.adapters import AdapterImage


@dataclass(frozen=True, slots=True, eq=False)
class HostCopy:
    """An adapter on a host."""

    pages: list[int]
    record: Tensor
    """int64 [W], with offsets into a page image."""


class HostPages:
    """One block of memory of equal pages, pinned where a GPU reads it."""

    def __init__(self, pages: int, page_bytes: int, *, pinned: bool) -> None:
        """Reserve it; without pinning the system gives memory when it is first written.

        Raises:
            ValueError: the system does not give so much.
        """
        try:
            self.memory = torch.empty((pages, page_bytes), dtype=torch.uint8, pin_memory=pinned)
        except RuntimeError as error:
            what = "pinned memory" if pinned else "memory"
            raise ValueError(
                f"the host does not give {pages * page_bytes} bytes of {what} for adapters: lower "
                f"--adapter-host-memory ({str(error).splitlines()[0]})"
            ) from error
        self._copies: dict[int, HostCopy] = {}
        self._lock = threading.Lock()

    @property
    def page_bytes(self) -> int:
        """Of every page."""
        return self.memory.shape[1]

    def store(self, handle: int, pages: list[int], image: AdapterImage) -> None:
        """Keep an adapter in these pages; its record is cloned, the rest copied."""
        for start, stop in runs(pages):
            at = pages[start]
            self.memory[at : at + stop - start].copy_(image.pages[start:stop])
        with self._lock:
            self._copies[handle] = HostCopy(pages, image.record.clone())

    def copy_of(self, handle: int) -> HostCopy:
        """An adapter that is stored."""
        with self._lock:
            return self._copies[handle]

    def drop(self, handle: int) -> None:
        """Forget an adapter, if it is here: of one that some rank had no memory for it may not be.

        Its pages are written anew by the next one that gets them.
        """
        with self._lock:
            self._copies.pop(handle, None)


def runs(*columns: Sequence[int]) -> list[tuple[int, int]]:
    """Cut numbers that stand side by side where any column is not followed by its successor.

    Returns:
        [start, stop) of each stretch in which all columns count up by one.
    """
    count = len(columns[0])
    breaks = [
        i for i in range(1, count) if any(column[i] != column[i - 1] + 1 for column in columns)
    ]
    edges = [0, *breaks, count]
    return list(itertools.pairwise(edges)) if count else []
