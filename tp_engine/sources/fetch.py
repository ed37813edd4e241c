"""Bringing an adapter's files from a source to the disk.

    stat all files ─> sizes within the limits ─> each file in blocks, from where it stands
    ─> sums ─> stat again: all are still what they were

A connection that breaks is made again and goes on from where it stood. Content that changes
meanwhile makes all begin anew.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeVar

from tp_engine.sources.area import Claim
from tp_engine.sources.errors import (
    FetchCancelled,
    SourceBroken,
    SourceChanged,
    SourceError,
)
from tp_engine.sources.head import HeadCheck
from tp_engine.sources.partial import PartialFile
from tp_engine.sources.source import RemoteFile, Source

log = logging.getLogger(__name__)

CONFIG_NAME: Final = "adapter_config.json"
WEIGHTS_NAME: Final = "adapter_model.safetensors"
MAX_CONFIG_BYTES: Final = 4 << 20
"""Longest ``adapter_config.json``."""
PROGRESS_BYTES: Final = 64 << 10
"""What a connection must bring to count as one that works."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchLimits:
    """How much, how often and how slow."""

    max_bytes: int
    """Of all files together."""
    attempts: int = 6
    """In a row that bring nothing."""
    restarts: int = 3
    """Because the content had changed."""
    pause: float = 0.5
    """Seconds before the second attempt; each later one waits twice as long."""
    stall: float = 60.0
    """Seconds within which `PROGRESS_BYTES` must come."""


@dataclass(slots=True, eq=False)
class FetchProgress:
    """How far a fetch is; the fetching thread writes it, any may read it or cancel."""

    done: int = 0
    """Bytes."""
    total: int | None = None
    """Bytes, once the source has told."""
    cancelled: threading.Event = field(default_factory=threading.Event)

    def check(self) -> None:
        """Raise `FetchCancelled` if that is wanted."""
        if self.cancelled.is_set():
            raise FetchCancelled


def fetch(
    source: Source,
    claim: Claim,
    limits: FetchLimits,
    progress: FetchProgress,
    sums: Mapping[str, str],
) -> None:
    """Bring the two files of an adapter into a claim's directory.

    Args:
        sums: SHA-256 that files must have, in hex, by name.

    Raises:
        SourceError: they cannot be had, or are not what they must be.
        FetchCancelled: ``progress`` was cancelled.
        OSError: the disk is full or broken.
    """
    fetching = _Fetch(source, claim, limits, progress, sums)
    for _ in range(limits.restarts):
        try:
            fetching.run()
            return
        except SourceChanged as error:
            log.warning("%s; its fetch begins anew", error)
            reason = str(error)
            claim.restart()
    raise SourceError("source_changed", f"{reason}, again and again")


class _Fetch:
    def __init__(
        self,
        source: Source,
        claim: Claim,
        limits: FetchLimits,
        progress: FetchProgress,
        sums: Mapping[str, str],
    ) -> None:
        self._source = source
        self._claim = claim
        self._limits = limits
        self._progress = progress
        self._sums = sums

    def run(self) -> None:
        files = [self._stat(name) for name in (CONFIG_NAME, WEIGHTS_NAME)]
        self._check_sizes(files)
        self._progress.done, self._progress.total = 0, sum(file.size for file in files)
        for file in files:
            self._bring(file)
        for file in files:
            if self._stat(file.name) != file:
                raise SourceChanged(f"{file.name} has changed while it was fetched")

    def _stat(self, name: str) -> RemoteFile:
        return self._patiently(lambda: self._source.stat(name), lambda: 0)

    def _check_sizes(self, files: list[RemoteFile]) -> None:
        for file in files:
            if file.name == CONFIG_NAME and file.size > MAX_CONFIG_BYTES:
                text = f"{file.name} has {file.size} bytes; at most {MAX_CONFIG_BYTES} are allowed"
                raise SourceError("too_many_bytes", text)
        total = sum(file.size for file in files)
        if total > self._limits.max_bytes:
            text = f"the adapter has {total} bytes; --adapter-max-bytes is {self._limits.max_bytes}"
            raise SourceError("too_many_bytes", text)

    def _bring(self, file: RemoteFile) -> None:
        """One file, wholly and with the right sum."""
        head = _head(file)
        with self._claim.part(file.name, file.size, file.tag) as part:
            part.replay(head.feed if head is not None else _unseen)
            self._progress.done += part.done
            if part.done < file.size:
                self._patiently(lambda: self._go_on(file, part), lambda: part.done)
            try:
                self._check_sum(file, part.sha256())
            except SourceError:
                part.restart()
                raise

    def _go_on(self, file: RemoteFile, part: PartialFile) -> None:
        """Add what one connection brings."""
        with self._source.blocks(file, part.done) as (start, blocks):
            if start != part.done:
                self._progress.done -= part.done
                part.restart()
            head = _head(file) if part.done == 0 else None
            since, brought = time.monotonic(), 0
            for block in blocks:
                self._progress.check()
                if part.done + len(block) > file.size:
                    raise SourceChanged(f"{file.name} has more than {file.size} bytes")
                if head is not None:
                    head.feed(block)
                part.write(block)
                self._progress.done += len(block)
                brought += len(block)
                if brought >= PROGRESS_BYTES:
                    since, brought = time.monotonic(), 0
                elif time.monotonic() - since > self._limits.stall:
                    raise SourceBroken(f"{file.name}: {brought} bytes in {self._limits.stall:g} s")
        if part.done < file.size:
            raise SourceBroken(f"{file.name} ended after {part.done} of {file.size} bytes")

    def _check_sum(self, file: RemoteFile, found: str) -> None:
        for wanted in (file.sha256, self._sums.get(file.name)):
            if wanted is not None and wanted.lower() != found:
                text = f"{file.name} has SHA-256 {found}, must be {wanted}"
                raise SourceError("checksum_mismatch", text)

    def _patiently(self, attempt: Callable[[], T], standing: Callable[[], int]) -> T:
        """What ``attempt`` gives; tried again while ``standing``, in bytes, grows."""
        idle, pause, stood = 0, self._limits.pause, standing()
        while True:
            self._progress.check()
            try:
                return attempt()
            except SourceBroken as error:
                idle = 0 if standing() - stood >= PROGRESS_BYTES else idle + 1
                stood = standing()
                if idle >= self._limits.attempts:
                    raise SourceError("source_failed", str(error)) from error
                if idle <= 1:
                    pause = self._limits.pause
                log.info("%s; trying again in %.1f s", error, pause)
            self._progress.cancelled.wait(pause)
            pause *= 2


def _head(file: RemoteFile) -> HeadCheck | None:
    return HeadCheck(file.name, file.size) if file.name == WEIGHTS_NAME else None


def _unseen(block: bytes) -> None:
    """Nothing to look at."""
