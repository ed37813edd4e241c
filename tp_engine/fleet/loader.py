"""The slow part of an adapter's way into the engine: disk, checks, cutting, packing."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Self

import torch

from tp_engine.adapters import (
    AdapterError,
    AdapterImage,
    AdapterRegistry,
    AdapterRevision,
    pack_adapter,
    read_adapter,
)
from tp_engine.adapters.errors import shown
from tp_engine.adapters.store import AdapterStore, Alias, StoreError
from tp_engine.fleet.errands import LeftOut, Loaded
from tp_engine.fleet.keeper import Keeper
from tp_engine.fleet.pushed import PUSHED
from tp_engine.rank import Rank, base_files

log = logging.getLogger(__name__)


class AdapterLoader(Keeper):
    """Rank 0's; see `tp_engine.fleet.errands.Loader`."""

    def __init__(self, rank: Rank, store: AdapterStore | None) -> None:
        """Work for a rank; with a store, what is loaded survives a restart."""
        super().__init__(store)
        self._rank = rank
        self._sources: dict[str, Path] = {}
        """Directories of revisions that the store does not have, by digest."""

    @classmethod
    def without_store(cls, rank: Rank, registry: AdapterRegistry) -> Self:
        """For a rank whose adapters can be read again from where they came from."""
        loader = cls(rank, None)
        for revision in registry.adapters.values():
            loader.keep_source(revision)
        return loader

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
        return self._packed(self._store.add(directory, self.read, source=source)[0])

    def load_kept(self, name: str, digest: str | None) -> Loaded:
        """Read and pack a revision of the store; None: the one before a name's last move.

        Raises:
            StoreError: there is no store, no such name or revision, or its files are damaged.
        """
        store = self._need_store()
        return self._packed(self._read_kept(store, digest or store.earlier(name)))

    def fetch(self, digest: str) -> list[AdapterImage]:
        """Read and pack a revision again that was read before.

        Raises:
            AdapterError, StoreError: its files are not what they were.
            OSError: they cannot be read.
        """
        directory = self._sources.get(digest) or self._pushed.find(digest)
        try:
            revision = self.read(directory or self._need_store().directory(digest))
        except AdapterError:
            if self._store is None or not self._store.has(digest):
                raise
            revision = self.read(self._store.directory(digest))  # it was written back meanwhile
        if revision.digest != digest:
            reason = f"its files hold revision {revision.digest} now, not {digest}"
            raise StoreError("damaged", reason)
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
        """Read, check, cut and pack what was pushed, and keep its files until the store has it.

        Raises:
            AdapterError: it is refused; the directory is deleted.
            StoreError: there is no store that it could be written to later.
        """
        try:
            self._need_store()
            revision = replace(self.read(directory), source=PUSHED)
        except BaseException:
            self.drop(directory)
            raise
        self._pushed.keep(revision.digest, directory)
        return self._packed(revision)

    def _packed(self, revision: AdapterRevision) -> Loaded:
        try:
            images = self.pack(revision)
        except ValueError:
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
        return read_adapter(
            directory,
            self._rank.joined.spec,
            base_names=(*config.base_names, config.model),
            base=base_files(self._rank.joined),
        )

    def _read_kept(self, store: AdapterStore, digest: str) -> AdapterRevision:
        """Read a revision of the store, which may have been kept for another base."""
        manifest = store.revision(digest).manifest
        revision = replace(self.read(store.directory(digest)), source=manifest.source)
        before, now = manifest.base_digest, store.base_digest
        if before == now:
            return revision
        warning = f"it was registered for the base {before}; it is applied to the base {now}"
        return replace(revision, warnings=(*revision.warnings, warning))

    def pack(self, revision: AdapterRevision) -> list[AdapterImage]:
        """Its images, one a rank.

        Raises:
            ValueError: a number in it does not fit the dtype that is served.
        """
        rank = self._rank
        dtype = getattr(torch, rank.config.dtype)
        return pack_adapter(revision, rank.cuts, rank.dims, dtype, rank.layout.page_bytes)

    def restore(self, registry: AdapterRegistry) -> set[str]:
        """Register what the store's names mean; those that are pinned.

        One that cannot be served keeps no other out.
        """
        aliases = [] if self._store is None else self._store.aliases()
        return {alias.name for alias in aliases if self._restore(registry, alias) and alias.pinned}

    def _restore(self, registry: AdapterRegistry, alias: Alias) -> bool:
        if alias.name in registry.adapters:
            log.warning(
                "adapter %s is taken from the command line, not from the store", shown(alias.name)
            )
            return False
        try:
            revision = self._read_kept(self._need_store(), alias.digest)
            registry.register(alias.name, revision)
        except (AdapterError, StoreError) as error:
            log.error("adapter %s of the store is left out: %s", shown(alias.name), error)
            self.left_out[alias.name] = LeftOut(digest=alias.digest, reason=str(error))
            return False
        for warning in revision.warnings:
            log.warning("adapter %s of the store: %s", shown(alias.name), warning)
        if alias.held:
            registry.hold(alias.name)
        return True
