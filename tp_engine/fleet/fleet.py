"""Adapters that come and go while the engine serves, on rank 0.

    load:    name checked ─> it arrives (`arriving`) ─> the name moves ─> the old revision leaves
    unload:  the name goes ─> the store's name goes (a thread); the revision leaves (`leaving`)

The loop calls `turn` between steps; what reads, writes, packs or sends is done elsewhere. A name
moves in one turn: requests before it keep the revision that they began with, and the old one is
forgotten when the last of them has ended.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

from tp_engine.adapters import AdapterError, AdapterRegistry, AdapterRevision
from tp_engine.adapters.errors import shown
from tp_engine.adapters.paths import resolve_adapter_path
from tp_engine.adapters.store import StoreError
from tp_engine.engine import Engine
from tp_engine.fleet.arriving import Arriving
from tp_engine.fleet.errands import CallError, Loader
from tp_engine.fleet.leaving import Leaving
from tp_engine.fleet.listing import Listing
from tp_engine.fleet.shared import Shared, refusal
from tp_engine.messages import (
    AdapterCall,
    AdapterReply,
    LoadAdapter,
    Message,
    MoveAdapter,
    UnloadAdapter,
)

log = logging.getLogger(__name__)


class AdapterFleet:
    """What the control plane may do, and what becomes of it."""

    def __init__(
        self,
        engine: Engine,
        registry: AdapterRegistry,
        loader: Loader,
        *,
        roots: Sequence[Path],
        drain_timeout: float,
    ) -> None:
        """Watch over a running engine.

        Args:
            engine: of rank 0.
            registry: what names mean; this alone changes it from now on.
            loader: does what is slow.
            roots: directories that adapters may be loaded from.
            drain_timeout: seconds that requests of a revision that goes may still take.
        """
        # One at a time: the engine's steps need the host's cores more than a load does.
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="adapter-reader")
        shared = Shared(engine=engine, registry=registry, loader=loader, reader=self._reader)
        self._shared = shared
        self._roots = [root.resolve() for root in roots]
        self._erasing: list[tuple[UnloadAdapter, str, Future[None]]] = []
        self._arriving = Arriving(shared, self._name)
        self._leaving = Leaving(shared, drain_timeout)
        self._listing = Listing(shared)
        self.changed = False
        """Whether names have changed since this was last cleared."""

    @property
    def busy(self) -> bool:
        """Whether `turn` has something to wait for."""
        parts = (self._arriving, self._leaving, self._listing)
        return bool(self._erasing) or any(part.busy for part in parts)

    def close(self) -> None:
        """Give up what has not been begun."""
        self._reader.shutdown(wait=False, cancel_futures=True)

    def handle(self, call: AdapterCall) -> list[AdapterReply]:
        """Begin what a call asks for; a refusal is answered at once, the rest by `turn`."""
        try:
            if isinstance(call, LoadAdapter):
                self._load(call)
            elif isinstance(call, MoveAdapter):
                self._move(call)
            elif isinstance(call, UnloadAdapter):
                self._unload(call)
            else:
                self._listing.begin(call)
            return []
        except (AdapterError, CallError) as error:
            return [refusal(call.call_id, error.code, str(error))]

    def turn(self) -> list[Message]:
        """Take up what other threads have finished; answers to calls, and ended requests."""
        self._shared.engine.roster.adopt_delivered()
        messages: list[Message] = [*self._arriving.turn()]
        while self._erasing and self._erasing[0][2].done():
            messages.append(_erased(*self._erasing.pop(0)))
        messages += self._listing.finished()
        messages += self._leaving.turn(wanted=self._arriving.read())
        return messages

    # --- loading -----------------------------------------------------------------------------

    def _load(self, call: LoadAdapter) -> None:
        name, loader = self._arriving.check_free(call.name), self._shared.loader
        named = self._shared.registry.adapters
        if name in named and not call.in_place:
            raise CallError(
                "adapter_exists",
                f"adapter {shown(name)} is loaded, with revision {named[name].digest}; "
                "load_inplace=true replaces it",
            )
        load = partial(loader.load, self._allowed(call.path))
        self._arriving.begin(call, name, load, loader.record)

    def _move(self, call: MoveAdapter) -> None:
        name, loader = self._arriving.check_free(call.name), self._shared.loader
        record = loader.record if call.revision is not None else loader.roll_back
        self._arriving.begin(call, name, partial(loader.load_kept, name, call.revision), record)

    def _allowed(self, path: str) -> Path:
        if not self._roots:
            reason = "the server was started without --adapter-root"
            raise CallError("path_refused", f"adapter path {shown(path)} is refused: {reason}")
        directory = resolve_adapter_path(path)
        if not any(directory.is_relative_to(root) for root in self._roots):
            roots = ", ".join(map(str, self._roots))
            raise CallError("path_refused", f"adapter path {shown(path)} is not inside {roots}")
        return directory

    def _name(self, name: str, revision: AdapterRevision) -> None:
        """Let a name mean a revision that all ranks have."""
        before = self._shared.registry.adapters.get(name)
        self._shared.registry.move(name, revision)
        self._leaving.keep(revision.digest)
        if before is not None:
            self._leaving.let_go(before.digest)
        self.changed = True

    # --- unloading ---------------------------------------------------------------------------

    def _unload(self, call: UnloadAdapter) -> None:
        before = self._shared.registry.adapters.get(call.name)
        if before is None:
            raise CallError("adapter_not_found", f"adapter {shown(call.name)} is not loaded")
        self._shared.registry.remove(call.name)
        self._leaving.let_go(before.digest)
        self.changed = True
        erased = self._reader.submit(self._shared.loader.erase, call.name)
        self._erasing.append((call, before.digest, erased))
        log.info("adapter %s is unloaded", shown(call.name))


def _erased(call: UnloadAdapter, digest: str, erased: Future[None]) -> AdapterReply:
    try:
        erased.result()
    except (StoreError, OSError) as error:
        return refusal(call.call_id, "store_failed", f"unloaded, but not for good: {error}")
    return AdapterReply(call_id=call.call_id, revision=digest)
