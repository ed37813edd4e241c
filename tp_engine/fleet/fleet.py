"""Adapters that come and go while the engine serves, on rank 0.

    load:    name checked ─> kept, read and packed (a thread) ─> delivered to all ranks
             ─> the store's name moves (a thread) ─> the name moves
    unload:  the name goes ─> the store's name goes (a thread) ─> the revision drains
             ─> it is forgotten on all ranks

The loop calls `turn` between steps; what reads, writes, packs or sends is done elsewhere. A name
moves in one turn: requests before it keep the revision that they began with, and the old one is
forgotten when the last of them has ended.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from tp_engine.adapters import AdapterError, AdapterRegistry, AdapterRevision
from tp_engine.adapters.errors import shown
from tp_engine.adapters.names import check_name
from tp_engine.adapters.paths import resolve_adapter_path
from tp_engine.adapters.store import StoreError
from tp_engine.engine import Engine
from tp_engine.fleet.errands import CallError, Loader, Loading
from tp_engine.fleet.listing import Listing
from tp_engine.messages import (
    AdapterCall,
    AdapterReply,
    Failed,
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
        self._engine = engine
        self._registry = registry
        self._loader = loader
        self._roots = [root.resolve() for root in roots]
        self._drain_timeout = drain_timeout
        # One at a time: the engine's steps need the host's cores more than a load does.
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="adapter-reader")
        self._loading: dict[str, Loading] = {}
        self._erasing: list[tuple[UnloadAdapter, str, Future[None]]] = []
        self._listing = Listing(engine, registry, loader, self._reader)
        self._draining: dict[str, float] = {}
        self.changed = False
        """Whether names have changed since this was last cleared."""

    @property
    def busy(self) -> bool:
        """Whether `turn` has something to wait for."""
        return bool(self._loading or self._erasing or self._listing.busy or self._draining)

    def close(self) -> None:
        """Give up what has not been begun."""
        self._reader.shutdown(wait=False, cancel_futures=True)

    def handle(self, call: AdapterCall) -> list[AdapterReply]:
        """Begin what a call asks for; a refusal is answered at once, the rest by `turn`."""
        try:
            if isinstance(call, LoadAdapter):
                self._begin_load(call)
            elif isinstance(call, MoveAdapter):
                self._begin_move(call)
            elif isinstance(call, UnloadAdapter):
                self._unload(call)
            else:
                self._listing.begin(call)
            return []
        except (AdapterError, CallError) as error:
            return [_refusal(call.call_id, error.code, str(error))]

    def turn(self) -> list[Message]:
        """Take up what other threads have finished; answers to calls, and ended requests."""
        self._engine.roster.adopt_delivered()
        messages: list[Message] = []
        for loading in list(self._loading.values()):
            reply = self._advance(loading)
            if reply is not None:
                del self._loading[loading.name]
                messages.append(reply)
        while self._erasing and self._erasing[0][2].done():
            messages.append(_erased(*self._erasing.pop(0)))
        messages += self._listing.finished()
        for digest, deadline in list(self._draining.items()):
            messages += self._drain(digest, deadline)
        return messages

    # --- loading -----------------------------------------------------------------------------

    def _begin_load(self, call: LoadAdapter) -> None:
        name = self._check_free(call.name)
        if name in self._registry.adapters and not call.in_place:
            digest = self._registry.adapters[name].digest
            raise CallError(
                "adapter_exists",
                f"adapter {shown(name)} is loaded, with revision {digest}; load_inplace=true "
                "replaces it",
            )
        loaded = self._reader.submit(self._loader.load, self._allowed(call.path))
        self._loading[name] = Loading(call, name, loaded, self._loader.record)

    def _begin_move(self, call: MoveAdapter) -> None:
        name = self._check_free(call.name)
        record = self._loader.record if call.revision is not None else self._loader.roll_back
        loaded = self._reader.submit(self._loader.load_kept, name, call.revision)
        self._loading[name] = Loading(call, name, loaded, record)

    def _check_free(self, name: str) -> str:
        """The name as it is registered; nobody else may be at it."""
        name = check_name(name, self._registry.base_names)
        if name in self._loading:
            raise CallError("adapter_loading", f"adapter {shown(name)} is being loaded already")
        return name

    def _allowed(self, path: str) -> Path:
        if not self._roots:
            reason = "the server was started without --adapter-root"
            raise CallError("path_refused", f"adapter path {shown(path)} is refused: {reason}")
        directory = resolve_adapter_path(path)
        if not any(directory.is_relative_to(root) for root in self._roots):
            roots = ", ".join(map(str, self._roots))
            raise CallError("path_refused", f"adapter path {shown(path)} is not inside {roots}")
        return directory

    def _advance(self, loading: Loading) -> AdapterReply | None:
        """Do what can be done now; the answer once it is over."""
        try:
            return self._take_steps(loading)
        except AdapterError as error:
            return _refusal(loading.call.call_id, error.code, str(error))
        except StoreError as error:
            return _refusal(loading.call.call_id, error.code, str(error))
        except ValueError as error:
            return _refusal(loading.call.call_id, "adapter_too_large", str(error))
        except OSError as error:
            return _refusal(loading.call.call_id, "unreadable", str(error))

    def _take_steps(self, loading: Loading) -> AdapterReply | None:
        roster = self._engine.roster
        if loading.revision is None and loading.loaded.done():
            loading.revision, images = loading.loaded.result()
            roster.deliver(loading.name, loading.revision, images)
            roster.adopt_delivered()
        revision = loading.revision
        if revision is None or revision.digest not in roster.adapters:
            return None
        if loading.recorded is None:
            loading.recorded = self._reader.submit(loading.record, loading.name, revision.digest)
        if not loading.recorded.done():
            return None
        loading.recorded.result()
        self._name(loading.name, revision)
        log.info("adapter %s is loaded, revision %s", shown(loading.name), revision.digest)
        return AdapterReply(
            call_id=loading.call.call_id,
            revision=revision.digest,
            applied=revision.applied,
            expected=revision.expected,
            warnings=list(revision.warnings),
        )

    def _name(self, name: str, revision: AdapterRevision) -> None:
        """Let a name mean a revision that all ranks have."""
        before = self._registry.adapters.get(name)
        self._registry.move(name, revision)
        self._draining.pop(revision.digest, None)
        if before is not None:
            self._let_go(before.digest)
        self.changed = True

    # --- unloading ---------------------------------------------------------------------------

    def _unload(self, call: UnloadAdapter) -> None:
        before = self._registry.adapters.get(call.name)
        if before is None:
            raise CallError("adapter_not_found", f"adapter {shown(call.name)} is not loaded")
        self._registry.remove(call.name)
        self._let_go(before.digest)
        self.changed = True
        erased = self._reader.submit(self._loader.erase, call.name)
        self._erasing.append((call, before.digest, erased))
        log.info("adapter %s is unloaded", shown(call.name))

    def _let_go(self, digest: str) -> None:
        """Forget a revision once its requests have ended, unless another name means it."""
        if all(kept.digest != digest for kept in self._registry.adapters.values()):
            self._draining[digest] = time.monotonic() + self._drain_timeout

    def _drain(self, digest: str, deadline: float) -> list[Message]:
        if any(each.revision and each.revision.digest == digest for each in self._loading.values()):
            return []  # it is about to get a name
        users = self._engine.users_of(digest)
        ended: list[Message] = []
        if users and time.monotonic() > deadline:
            text = f"the adapter was unloaded and this took more than {self._drain_timeout:g} s"
            for request_id in users:
                self._engine.abort(request_id)
                ended.append(Failed(request_id=request_id, code="adapter_unloaded", message=text))
            users = []
        if not users:
            self._engine.unregister(digest)
            del self._draining[digest]
        return ended


def _erased(call: UnloadAdapter, digest: str, erased: Future[None]) -> AdapterReply:
    try:
        erased.result()
    except (StoreError, OSError) as error:
        return _refusal(call.call_id, "store_failed", f"unloaded, but not for good: {error}")
    return AdapterReply(call_id=call.call_id, revision=digest)


def _refusal(call_id: str, code: str, message: str) -> AdapterReply:
    return AdapterReply(call_id=call_id, code=code, message=message)
