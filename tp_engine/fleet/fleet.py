"""Adapters that come, change and go while the engine serves, on rank 0.

    load, move:  name checked ─> it arrives (`arriving`) ─> the name moves, the old revision leaves
    push:        likewise, but the store is told later (`dirty`)
    drain:       the name takes no new requests (`names`) ─> as it was, or unload
    unload:      the name goes, also in the store (`recording`) ─> the revision leaves (`leaving`)

The loop calls `turn` between steps; what reads, writes, packs or sends is done elsewhere. A name
moves in one turn: requests before it keep the revision that they began with, and the old one is
forgotten when the last of them has ended. What revisions hold is read, kept and deleted by one
thread (the reader), what names mean in the store is changed and looked up by another (the
recorder), which waits for no read. Each works in the order in which it was asked: so the store's
names go through the same changes as the loop's, some later.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from tp_engine.adapters import AdapterError, AdapterRegistry
from tp_engine.adapters.errors import shown
from tp_engine.adapters.names import normalise
from tp_engine.engine import Engine
from tp_engine.fleet.arriving import Arriving
from tp_engine.fleet.dirty import Dirty
from tp_engine.fleet.errands import CallError, Loader, Loading
from tp_engine.fleet.holds import Holds
from tp_engine.fleet.leaving import Leaving
from tp_engine.fleet.listing import Listing
from tp_engine.fleet.loads import Loads
from tp_engine.fleet.names import Names
from tp_engine.fleet.preloading import Preloading
from tp_engine.fleet.recording import Recording
from tp_engine.fleet.roots import Roots
from tp_engine.fleet.shared import Shared, refusal
from tp_engine.fleet.usage import Usage
from tp_engine.messages import (
    AdapterCall,
    AdapterReply,
    DrainAdapter,
    FlushAdapters,
    ListAdapters,
    LoadAdapter,
    Message,
    MoveAdapter,
    PinAdapter,
    PreloadAdapter,
    PushAdapter,
    ResumeAdapter,
    Stats,
    UnloadAdapter,
)
from tp_engine.shortage import OneThread

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
        fetched: Path | None = None,
        drain_timeout: float,
        flush_interval: float,
        pinned: Collection[str] = (),
    ) -> None:
        """Watch over a running engine.

        Args:
            engine: of rank 0.
            registry: what names mean; this alone changes it from now on.
            loader: does what is slow.
            roots: directories that adapters may be loaded from.
            fetched: directory that the front end fetches adapters to.
            drain_timeout: seconds that requests of a revision that goes may still take.
            flush_interval: seconds after which what was pushed is written to the store; 0: never.
            pinned: names that are kept in memory.
        """
        # One load at a time: the engine's steps need the host's cores more.
        self._reader = OneThread("adapter-reader")
        self._recorder = OneThread("adapter-recorder")
        shared = Shared(
            engine=engine,
            registry=registry,
            loader=loader,
            reader=self._reader,
            recorder=self._recorder,
        )
        self._shared = shared
        self._pinned = set(pinned)
        self._usage = Usage()
        self._leaving = Leaving(shared, drain_timeout)
        self._recording = Recording(shared, self._leaving)
        self._dirty = Dirty(shared, self._leaving, flush_interval)
        self._arriving = Arriving(shared, self._leaving, self._arrived)
        loads = Loads(shared, Roots(roots, fetched), self._arriving, self._dirty)
        self._names = Names(shared, self._recording, self._dirty, self._pinned, self._remove)
        self._holds = Holds(shared, self._dirty, self._pinned)
        self._preloading = Preloading(shared)
        self._listing = Listing(shared, self._dirty, self._usage, self._pinned)
        self._handlers: dict[type[AdapterCall], Callable[[Any], None]] = {
            LoadAdapter: loads.load,
            MoveAdapter: loads.move,
            PushAdapter: loads.push,
            FlushAdapters: self._flush,
            PinAdapter: self._names.pin,
            DrainAdapter: self._names.drain,
            ResumeAdapter: self._names.resume,
            PreloadAdapter: self._preload,
            UnloadAdapter: self._unload,
            ListAdapters: self._listing.begin,
        }
        self.changed = False
        """Whether names have changed since this was last cleared."""

    @property
    def busy(self) -> bool:
        """Whether `turn` has something to wait for."""
        parts = (
            *(self._arriving, self._leaving, self._recording, self._dirty),
            *(self._names, self._preloading, self._listing),
        )
        return any(part.busy for part in parts)

    def close(self) -> None:
        """Give up what has not been begun."""
        self._reader.shutdown(wait=False, cancel_futures=True)
        self._recorder.shutdown(wait=False, cancel_futures=True)

    def admit(self, model: str) -> str:
        """The digest of what a new request's model means, empty for the base.

        Raises:
            UnknownModel: it means nothing.
            ModelHeld: it takes no new requests.
        """
        resolved = self._shared.registry.resolve(model)
        if resolved.revision is not None:
            self._usage.count(resolved.name)
        return resolved.digest

    def handle(self, call: AdapterCall) -> list[AdapterReply]:
        """Begin what a call asks for; a refusal is answered at once, the rest by `turn`."""
        if call.name is not None:
            call = msgspec.structs.replace(call, name=normalise(call.name))
        try:
            self._handlers[type(call)](call)
            self.changed |= isinstance(call, DrainAdapter | ResumeAdapter)
            return []
        except (AdapterError, CallError) as error:
            return [refusal(call.call_id, error.code, str(error))]

    def turn(self) -> list[Message]:
        """Take up what other threads have finished; answers to calls, and ended requests."""
        self._shared.engine.roster.adopt_delivered()
        self._holds.turn()
        return [
            *self._arriving.turn(),
            *self._recording.turn(),
            *self._dirty.turn(),
            *self._preloading.turn(),
            *self._listing.finished(),
            *self._names.turn(),
            *self._leaving.turn(wanted=self._arriving.read()),
        ]

    def put_away(self) -> bool:
        """Write back what was pushed, for the stop of the service; whether all was tried, and what
        was done before is written too."""
        return self._dirty.put_away() and not (self._arriving.busy or self._recording.busy)

    def stats(self) -> Stats:
        """The engine's, with what is known here and the names that adapters have now."""
        engine, named = self._shared.engine, self._shared.registry.adapters
        stats, residency = engine.stats(), engine.residency
        waited = {each.adapter.digest for each in engine.scheduler.queued if each.adapter}
        running = [
            name
            for name, card in named.items()
            if residency.is_resident(engine.adapters[card.digest].handle)
        ]
        waiting = [name for name, card in named.items() if card.digest in waited]
        gauges = {
            "adapters_dirty": float(len(self._dirty.names)),
            "adapters_pinned": float(len(self._pinned)),
            "revisions_draining": float(len(self._leaving)),
        }
        return msgspec.structs.replace(
            stats,
            gauges=stats.gauges | gauges,
            running_adapters=sorted(running),
            waiting_adapters=sorted(set(waiting) - set(running)),
        )

    @property
    def unsaved(self) -> list[str]:
        """Names that mean what a stop would lose now."""
        return self._dirty.names

    # --- arriving ----------------------------------------------------------------------------

    def _flush(self, call: FlushAdapters) -> None:
        if call.name is not None:
            self._names.find(call.name)
        self._dirty.flush(call)

    def _preload(self, call: PreloadAdapter) -> None:
        self._preloading.begin(call, self._names.find(call.name))

    def _arrived(self, loading: Loading) -> AdapterReply:
        """Let a name mean a revision that all ranks have."""
        name, revision = loading.name, loading.revision
        assert revision is not None
        before = self._shared.registry.adapters.get(name)
        moves = before is None or before.digest != revision.digest
        if moves:
            self._shared.registry.move(name, revision)
            self._leaving.keep(revision.digest)
            if before is not None:
                self._leaving.let_go(before.digest)
            self.changed = True
        if loading.record is not None:
            self._dirty.clear(name)
        elif moves:
            self._dirty.mark(name, revision.digest)
        log.info("adapter %s is loaded, revision %s", shown(name), revision.digest)
        return AdapterReply(
            call_id=loading.call.call_id,
            revision=revision.digest,
            applied=revision.applied,
            expected=revision.expected,
            warnings=revision.warnings,
            durable=None if loading.record is not None else self._dirty.find(name) is None,
        )

    # --- leaving -----------------------------------------------------------------------------

    def _unload(self, call: UnloadAdapter) -> None:
        left_out = self._shared.loader.left_out.get(call.name)
        if left_out is not None and call.name not in self._shared.registry.adapters:
            if not self._arriving.is_free(call.name):
                raise _loading(call.name)
            reply = AdapterReply(call_id=call.call_id, revision=left_out.digest)
            self._recording.begin(partial(self._shared.loader.erase, call.name), reply)
            return
        digest = self._names.find(call.name).digest
        requests = len(self._shared.engine.users_of(digest))
        reply = AdapterReply(call_id=call.call_id, revision=digest, requests=requests)
        if not self._remove(call.name, reply):
            raise _loading(call.name)

    def _remove(self, name: str, reply: AdapterReply | None = None) -> bool:
        """Let a name mean nothing, and answer when the store knows; not while it is loaded, for
        then the store would hear of that and of this in another order than the loop."""
        if not self._arriving.is_free(name):
            return False
        digest = self._names.find(name).digest
        self._shared.registry.remove(name)
        self._names.gone(name)
        self._usage.forget(name)
        self._dirty.gone(name)
        self._leaving.let_go(digest)
        self.changed = True
        self._recording.begin(partial(self._shared.loader.erase, name), reply)
        log.info("adapter %s is unloaded", shown(name))
        return True


def _loading(name: str) -> CallError:
    return CallError("adapter_loading", f"adapter {shown(name)} is being loaded")
