"""Adapters that a service starts with, between their reading and their handing out."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tp_engine.adapters import (
    AdapterError,
    AdapterImage,
    AdapterRegistry,
    AdapterRevision,
    ImageSize,
    KnownRevision,
    RevisionCard,
)
from tp_engine.adapters.errors import shown
from tp_engine.adapters.names import check_name
from tp_engine.adapters.store import AdapterStore, Alias, StoreError
from tp_engine.engine import Engine
from tp_engine.fleet.errands import LeftOut
from tp_engine.fleet.loader import AdapterLoader

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Waiting:
    name: str
    digest: str
    size: ImageSize
    images: Sequence[AdapterImage] | None


class StartingAdapters:
    """Page images as far as the hosts have room for them; of the rest, what is to be known."""

    def __init__(self, loader: AdapterLoader, host_pages: int) -> None:
        """Begin with none.

        Args:
            loader: packs, and can read again.
            host_pages: of every rank's host memory.
        """
        self._loader = loader
        self._room = host_pages
        self._waiting: list[_Waiting] = []
        self._refused: list[tuple[str, str, ValueError]] = []
        """Names, with the digests of what they mean."""
        self._restored: set[str] = set()

    def take(self, name: str, revision: AdapterRevision) -> None:
        """An adapter of the command line that was read."""
        self._loader.keep_source(revision)
        self._pack(name, revision)

    def restore(self, registry: AdapterRegistry) -> set[str]:
        """Register what the store's names mean; those that are pinned.

        What was served in the same way before is not read. One that cannot be served keeps no
        other out.
        """
        store = self._loader.store
        if store is None:
            return set()
        sizes = store.sizes(self._loader.layout)
        found: dict[str, KnownRevision] = {}
        aliases = store.aliases()
        for alias in aliases:
            if alias.name in registry.adapters:
                text = "adapter %s is taken from the command line, not from the store"
                log.warning(text, shown(alias.name))
                continue
            try:
                check_name(alias.name, registry.base_names)  # the base may have a new name
                revision = self._known(store, alias, sizes.get(alias.digest))
            except (AdapterError, StoreError, OSError) as error:
                self._leave_out(alias.name, alias.digest, error)
                continue
            found[alias.name] = revision
            for warning in revision.warnings:
                log.warning("adapter %s of the store: %s", shown(alias.name), warning)
        registry.register_all(found)
        self._restored |= found.keys()
        for alias in aliases:
            if alias.hold and alias.name in found:
                registry.hold(alias.name)
        return {alias.name for alias in aliases if alias.pinned and alias.name in found}

    def hand_out(
        self, engine: Engine, registry: AdapterRegistry, on_error: Literal["fail", "skip"]
    ) -> None:
        """Give the hosts what there is; the other ranks must follow.

        The name of an adapter that does not fit the arena, the hosts or the dtype is taken out.

        Raises:
            ValueError: that is one of the command line's, and ``on_error`` is ``fail``.
        """
        for waiting in self._waiting:
            try:
                engine.roster.start(waiting.name, waiting.digest, waiting.size, waiting.images)
            except ValueError as error:
                self._refused.append((waiting.name, waiting.digest, error))
        self._waiting.clear()
        for name, digest, refusal in self._refused:
            if name in self._restored:
                self._leave_out(name, digest, refusal)
            elif on_error == "fail":
                raise refusal
            else:
                log.error("adapter %s is left out: %s", shown(name), refusal)
            registry.remove(name)

    def _leave_out(self, name: str, digest: str, error: Exception) -> None:
        log.error("adapter %s of the store is left out: %s", shown(name), error)
        self._loader.left_out[name] = LeftOut(digest=digest, reason=str(error))

    def _known(self, store: AdapterStore, alias: Alias, size: ImageSize | None) -> KnownRevision:
        if size is None:
            revision = self._loader.read_kept(alias.digest)
            self._pack(alias.name, revision)
            return revision
        manifest = store.check_whole(alias.digest).manifest
        warnings = (*manifest.warnings, *self._loader.base_warnings(manifest))
        self._waiting.append(_Waiting(alias.name, alias.digest, size, None))
        return replace(RevisionCard.of(manifest), warnings=warnings)

    def _pack(self, name: str, revision: AdapterRevision) -> None:
        try:
            images = self._loader.pack(revision)
        except ValueError as error:
            self._refused.append((name, revision.digest, error))
            return
        size = ImageSize.of(revision, images)
        self._loader.keep_size(revision.digest, size)
        keep = size.pages <= self._room
        self._room -= size.pages if keep else 0
        self._waiting.append(_Waiting(name, revision.digest, size, images if keep else None))
