"""The slow part of an adapter's way into the engine: disk, checks, cutting, packing."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import torch

from tp_engine.adapters import (
    AdapterError,
    AdapterImage,
    AdapterRevision,
    ImageSize,
    pack_adapter,
    read_adapter,
)
from tp_engine.adapters.errors import OutOfMemory
from tp_engine.adapters.store import AdapterStore, Manifest, StoreError
from tp_engine.fleet.errands import Loaded
from tp_engine.fleet.keeper import Keeper
from tp_engine.fleet.pushed import PUSHED
from tp_engine.rank import Rank, base_files
from tp_engine.shortage import asking_for

log = logging.getLogger(__name__)

PACKING_VERSION = 1
"""Changes when the same revision takes other pages or words."""


class AdapterLoader(Keeper):
    """Rank 0's; see `tp_engine.fleet.errands.Loader`."""

    def __init__(self, rank: Rank, store: AdapterStore | None) -> None:
        """Work for a rank; with a store, what is loaded survives a restart."""
        super().__init__(store)
        self._rank = rank
        self._sources: dict[str, Path] = {}
        """Directories of revisions that the store does not have, by digest."""

    @property
    def store(self) -> AdapterStore | None:
        """Where revisions are kept."""
        return self._store

    @property
    def layout(self) -> str:
        """What the size of a revision's images depends on beside the revision."""
        rank = self._rank
        parts = (rank.base_digest, rank.config.dtype, rank.comm.world, rank.layout.page_bytes)
        return " ".join(map(str, (PACKING_VERSION, *parts)))

    def load(self, directory: Path, source: str = "") -> Loaded:
        """Keep, read, check, cut and pack an adapter; ``source`` is where it was fetched from.

        Raises:
            AdapterError: it is refused; nothing is kept.
            OSError: the store cannot be written.
        """
        if self._store is None:
            revision = self.read(directory)
            self.keep_source(revision)
            return self._packed(revision)
        revision, _ = self._store.add(directory, self.read, source=source)
        self._pushed.drop(revision.digest)
        return self._packed(revision)

    def load_kept(self, digest: str) -> Loaded:
        """Read and pack a revision of the store.

        Raises:
            StoreError: there is no store, no such revision, or its files are damaged.
        """
        return self._packed(self.read_kept(digest))

    def fetch(self, digest: str) -> list[AdapterImage]:
        """Read and pack a revision again that was read before.

        Raises:
            AdapterError, StoreError: its files are not what they were.
            OSError: they cannot be read.
        """
        directory = self._sources.get(digest) or self._pushed.find(digest)
        try:
            found = self.read(directory or self._need_store().unchecked_directory(digest))
            if found.digest == digest:
                return self.pack(found)
            reason = f"its files hold revision {found.digest} now, not {digest}"
            refusal: ValueError = StoreError("damaged", reason)
        except OutOfMemory:
            raise
        except AdapterError as error:
            refusal = error
        if self._store is None or not self._store.has(digest):
            raise refusal
        revision = self.read(self._store.directory(digest))  # says what is wrong with it, if it is
        return self.pack(revision)

    def keep_source(self, revision: AdapterRevision) -> None:
        """Remember where a revision can be read again that the store does not have."""
        self._sources[revision.digest] = Path(revision.source)

    def discard(self, digest: str) -> None:
        """See `Keeper.discard`."""
        if not self._loaded[digest]:
            self._sources.pop(digest, None)
        super().discard(digest)

    def load_pushed(self, directory: Path) -> Loaded:
        """Read, check, cut and pack what was pushed, and keep its files until the store has them.

        Raises:
            AdapterError: it is refused; the directory is deleted.
            StoreError: there is no store that it could be written to later.
        """
        try:
            store = self._need_store()
            revision = replace(self.read(directory), source=PUSHED)
        except BaseException:
            self.drop(directory)
            raise
        if store.is_whole(revision.digest):
            self.drop(directory)
        else:
            self._pushed.keep(revision.digest, directory)
        return self._packed(revision)

    def _packed(self, revision: AdapterRevision) -> Loaded:
        try:
            images = self.pack(revision)
            self.keep_size(revision.digest, ImageSize.of(revision, images))
        except BaseException:
            self.discard(revision.digest)
            raise
        self._loaded[revision.digest] += 1
        return revision, images

    def read(self, directory: Path) -> AdapterRevision:
        """Read and check an adapter.

        Raises:
            AdapterError: it is refused.
        """
        config = self._rank.config
        try:
            with asking_for("its files"):
                return read_adapter(
                    directory,
                    self._rank.joined.spec,
                    base_names=(*config.base_names, config.model),
                    base=base_files(self._rank.joined),
                )
        except AdapterError:
            raise
        except Exception as error:
            raise _unforeseen(directory, error) from error

    def read_kept(self, digest: str) -> AdapterRevision:
        """Read a revision of the store, which may have been kept for another base.

        Raises:
            StoreError: there is no store, or no such revision, or its files are damaged.
        """
        store = self._need_store()
        manifest = store.revision(digest).manifest
        revision = replace(self.read(store.directory(digest)), source=manifest.source)
        return replace(revision, warnings=(*revision.warnings, *self.base_warnings(manifest)))

    def base_warnings(self, manifest: Manifest) -> tuple[str, ...]:
        """What to say of a revision that was kept for another base."""
        before, now = manifest.base_digest, self._need_store().base_digest
        if before == now:
            return ()
        return (f"it was registered for the base {before}; it is applied to the base {now}",)

    def pack(self, revision: AdapterRevision) -> list[AdapterImage]:
        """Its images, one a rank.

        Raises:
            ValueError: a number does not fit the dtype that is served, a row no page, all of it no
                memory.
        """
        rank = self._rank
        dtype = getattr(torch, rank.config.dtype)
        try:
            with asking_for("its page images"):
                return pack_adapter(revision, rank.cuts, rank.dims, dtype, rank.layout.page_bytes)
        except ValueError:
            raise
        except Exception as error:
            raise _unforeseen(revision.source, error) from error

    def keep_size(self, digest: str, size: ImageSize) -> None:
        """Let a start know what a revision of the store takes without reading it."""
        if self._store is not None and self._store.has(digest):
            self._store.keep_size(digest, self.layout, size)


def _unforeseen(source: object, error: Exception) -> AdapterError:
    """A refusal for what an adapter's content provokes that nobody has thought of, even a broken
    assertion: reading and packing touch nothing but that content, and no other rank knows of it as
    yet. So the load ends, not the service; the trace in the log is for who mends the program."""
    log.exception("the adapter in %s cannot be read or packed", source)
    return AdapterError("unreadable", f"{source}: {type(error).__name__}: {error}")
