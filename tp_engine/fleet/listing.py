"""What operators may see of the fleet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial

from tp_engine.adapters.errors import OutOfMemory
from tp_engine.fleet.dirty import Dirty
from tp_engine.fleet.errands import Kept, LeftOut
from tp_engine.fleet.shared import Shared, refusal
from tp_engine.fleet.usage import Usage
from tp_engine.messages import (
    AdapterList,
    AdapterReply,
    AdapterState,
    AdapterStatus,
    ListAdapters,
)


class Listing:
    """Answers `ListAdapters`: what the store knows comes from another thread, the rest is at hand
    in the loop."""

    def __init__(self, shared: Shared, dirty: Dirty, usage: Usage, pinned: set[str]) -> None:
        """Look at a fleet."""
        self._shared = shared
        self._dirty = dirty
        self._usage = usage
        self._pinned = pinned
        self._open: list[tuple[ListAdapters, Future[dict[str, Kept]]]] = []

    @property
    def busy(self) -> bool:
        """Whether `finished` has something to wait for."""
        return bool(self._open)

    def begin(self, call: ListAdapters) -> None:
        """Begin to answer a call."""
        left_out = self._shared.loader.left_out
        digests = {name: each.digest for name, each in left_out.items()}
        digests |= {name: each.digest for name, each in self._shared.registry.adapters.items()}
        asked = {
            name: digests[name]
            for name in sorted(digests)
            if name > call.after
            and name.startswith(call.prefix)
            and call.name in (None, name)
            and call.state in ("", self._state(name))
        }
        self._open.append((call, self._shared.recorder.submit(partial(self._kept, call, asked))))

    def finished(self) -> list[AdapterList | AdapterReply]:
        """The answers that are ready."""
        answers = []
        while self._open and self._open[0][1].done():
            call, found = self._open.pop(0)
            answers.append(self._answer(call.call_id, found))
        return answers

    def _answer(self, call_id: str, found: Future[dict[str, Kept]]) -> AdapterList | AdapterReply:
        try:
            return AdapterList(call_id=call_id, adapters=self._all(found.result()))
        except OutOfMemory as error:
            return refusal(call_id, error.code, str(error))
        except OSError as error:
            return refusal(call_id, "store_failed", str(error))

    def _kept(self, call: ListAdapters, asked: Mapping[str, str]) -> dict[str, Kept]:
        """In the recorder's thread: what the store knows of the first ones."""
        found: dict[str, Kept] = {}
        for name, digest in asked.items():
            kept = self._shared.loader.kept(name, digest, whole=call.name is not None)
            if kept.base.startswith(call.base) or not kept.base:
                found[name] = kept
            if len(found) == call.limit:
                break
        return found

    def _state(self, name: str) -> AdapterState:
        registry = self._shared.registry
        if name not in registry.adapters:
            return "failed"
        return "draining" if name in registry.held else "ready"

    def _all(self, found: dict[str, Kept]) -> list[AdapterStatus]:
        open_requests, running = Counter[str](), Counter[str]()
        for request in self._shared.engine.requests.values():
            if request.adapter is not None:
                open_requests[request.adapter.digest] += 1
                running[request.adapter.digest] += request.slot is not None
        statuses = []
        for name, kept in found.items():
            left_out = self._shared.loader.left_out.get(name)
            if name in self._shared.registry.adapters:
                statuses.append(self._status(name, kept, open_requests, running))
            elif left_out is not None:  # else it went meanwhile
                statuses.append(_failed(name, left_out, kept))
        return statuses

    def _status(
        self, name: str, kept: Kept, open_requests: Counter[str], running: Counter[str]
    ) -> AdapterStatus:
        shared, unsaved = self._shared, self._dirty.find(name)
        revision = shared.registry.adapters[name]
        footprint = shared.engine.adapters[revision.digest]
        return AdapterStatus(
            name=name,
            state=self._state(name),
            revision=revision.digest,
            source=revision.source,
            max_rank=footprint.max_rank,
            modules=revision.applied,
            pages=footprint.pages,
            on_disk=kept.on_disk,
            warm=shared.engine.roster.is_warm(revision.digest),
            resident=shared.engine.residency.is_resident(footprint.handle),
            requests=open_requests[revision.digest],
            running=running[revision.digest],
            hits=self._usage.hits(name),
            last_use=self._usage.last(name),
            pinned=name in self._pinned,
            draining=name in shared.registry.held,
            dirty=unsaved is not None,
            write_error="" if unsaved is None else unsaved.error,
            history=kept.history,
            manifest=kept.manifest,
        )


def _failed(name: str, left_out: LeftOut, kept: Kept) -> AdapterStatus:
    return AdapterStatus(
        name=name,
        state="failed",
        reason=left_out.reason,
        revision=left_out.digest,
        history=kept.history,
        manifest=kept.manifest,
    )
