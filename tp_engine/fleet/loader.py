"""The slow part of an adapter's way into the engine: disk, checks, cutting, packing."""

from __future__ import annotations

import logging
from pathlib import Path

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
from tp_engine.adapters.store import AdapterStore, StoreError
from tp_engine.rank import Rank

log = logging.getLogger(__name__)


class AdapterLoader:
    """Rank 0's; see `tp_engine.fleet.errands.Loader`."""

    def __init__(self, rank: Rank, store: AdapterStore | None) -> None:
        """Work for a rank; with a store, what is loaded survives a restart."""
        self._rank = rank
        self._store = store

    def load(self, directory: Path) -> tuple[AdapterRevision, list[AdapterImage]]:
        """Keep, read, check, cut and pack an adapter.

        Raises:
            AdapterError: it is refused; nothing is kept.
            OSError: the store cannot be written.
        """
        if self._store is None:
            revision = self.read(directory)
        else:
            revision, _ = self._store.add(directory, self.read)
        return revision, self.pack(revision)

    def load_kept(
        self, name: str, digest: str | None
    ) -> tuple[AdapterRevision, list[AdapterImage]]:
        """Read and pack a revision of the store; None: the one before a name's last move.

        Raises:
            StoreError: there is no store, no such name or revision, or its files are damaged.
        """
        store = self._need_store()
        revision = self.read(store.directory(digest or store.earlier(name)))
        return revision, self.pack(revision)

    def record(self, name: str, digest: str) -> None:
        """Make it last that a name means a revision."""
        if self._store is not None:
            self._store.promote(name, digest)

    def roll_back(self, name: str, digest: str) -> None:
        """Make it last that a name means what it meant before its last move, this revision."""
        assert self._need_store().roll_back(name).digest == digest

    def history(self, name: str) -> list[str]:
        """Revisions that a name meant, the present one first; none without a store."""
        return [] if self._store is None else [move.digest for move in self._store.moves(name)]

    def _need_store(self) -> AdapterStore:
        if self._store is None:
            raise StoreError("no_store", "the server was started without --adapter-store")
        return self._store

    def erase(self, name: str) -> None:
        """Make it last that a name means nothing; delete what nothing refers to any more."""
        if self._store is not None and self._store.knows(name):
            for digest in self._store.unname(name):
                self._store.discard(digest)

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
        )

    def pack(self, revision: AdapterRevision) -> list[AdapterImage]:
        """Its images, one a rank.

        Raises:
            ValueError: a number in it does not fit the dtype that is served.
        """
        rank = self._rank
        dtype = getattr(torch, rank.config.dtype)
        return pack_adapter(revision, rank.cuts, rank.dims, dtype, rank.layout.page_bytes)

    def restore(self, registry: AdapterRegistry) -> None:
        """Register what the store's names mean; one that cannot be served keeps no other out."""
        for alias in [] if self._store is None else self._store.aliases():
            assert self._store is not None
            if alias.name in registry.adapters:
                log.warning(
                    "adapter %s is taken from the command line, not from the store",
                    shown(alias.name),
                )
                continue
            try:
                revision = self.read(self._store.directory(alias.digest))
                registry.register(alias.name, revision)
            except (AdapterError, StoreError) as error:
                log.error("adapter %s of the store is left out: %s", shown(alias.name), error)
