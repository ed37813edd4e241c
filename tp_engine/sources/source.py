"""What every kind of source can do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from tp_engine.sources.errors import SourceError
from tp_engine.sources.urls import AllowedSources, SourceUrl


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteFile:
    """One file as the source describes it before its content is read."""

    name: str
    size: int
    """In bytes."""
    tag: str | None
    """Tells this content from any other under the name; None: the source has nothing to say."""
    sha256: str | None = None
    """In hex, where the source knows it."""


class Source(Protocol):
    """One adapter somewhere else. Methods are called in one thread and may wait long.

    They raise `SourceError` for good, `SourceBroken` for now, `SourceChanged` when the content is
    not that of ``file`` any more.
    """

    def stat(self, name: str) -> RemoteFile:
        """Describe a file, without reading it."""
        ...

    def blocks(
        self, file: RemoteFile, offset: int
    ) -> AbstractContextManager[tuple[int, Iterator[bytes]]]:
        """The content from ``offset``, or from 0 if it cannot be had from there: where it begins,
        and blocks of up to a few MB, which may end early."""
        ...

    def close(self) -> None:
        """Close connections."""
        ...


def open_source(url: SourceUrl, allowed: AllowedSources) -> Source:
    """The source at an address that ``allowed`` covers; nothing is asked for yet.

    Raises:
        SourceError: the package for its scheme is not installed.
    """
    assert allowed.cover(url)
    if url.scheme in ("http", "https"):
        from tp_engine.sources.http import HttpSource

        return HttpSource(url, allowed)
    if url.scheme == "hf":
        from tp_engine.sources.hub import HubSource

        return HubSource(url)
    try:
        from tp_engine.sources.s3 import S3Source
    except ImportError as error:
        raise SourceError("source_failed", f"{url} needs a package: {error}") from error
    return S3Source(url)
