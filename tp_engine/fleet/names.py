"""What is done to names while what they mean stays: pinned, drained, resumed, taken away.

drain: no new requests ─> those of the name end, or are ended at the deadline
─> it stays so until it is resumed, or goes: at the next start if this process ends first
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tp_engine.adapters import RevisionCard, UnknownModel
from tp_engine.adapters.errors import shown
from tp_engine.adapters.store import Hold
from tp_engine.fleet.dirty import Dirty
from tp_engine.fleet.errands import CallError, LetGo
from tp_engine.fleet.recording import Recording
from tp_engine.fleet.shared import Shared
from tp_engine.messages import (
    AdapterReply,
    DrainAdapter,
    Failed,
    NameCall,
    PinAdapter,
    ResumeAdapter,
)


@dataclass(frozen=True, slots=True)
class _Drain:
    """A name's last requests."""

    requests: list[str]
    deadline: float
    remove: bool


class Names:
    """The names that are pinned or drain."""

    def __init__(
        self,
        shared: Shared,
        recording: Recording,
        dirty: Dirty,
        pinned: set[str],
        remove: Callable[[str], bool],
    ) -> None:
        """Begin with what the store knows.

        Args:
            shared: the fleet's.
            recording: writes what is done.
            dirty: names that the store may not know yet.
            pinned: names, changed in place.
            remove: takes a name away, unless something is on its way to it; whether it did.
        """
        self._shared = shared
        self._recording = recording
        self._dirty = dirty
        self._pinned = pinned
        self._remove = remove
        self._drains: dict[str, _Drain] = {}

    @property
    def busy(self) -> bool:
        """Whether `turn` has something to wait for."""
        return bool(self._drains)

    def pin(self, call: PinAdapter) -> None:
        """Keep what a name means in memory, or no longer."""
        revision = self.find(call.name)
        (self._pinned.add if call.pinned else self._pinned.discard)(call.name)
        self._record(call, revision, partial(self._shared.loader.pin, call.name, call.pinned))

    def drain(self, call: DrainAdapter) -> None:
        """Give a name no new requests."""
        revision = self.find(call.name)
        self._shared.registry.hold(call.name)
        requests = [
            request_id
            for request_id in self._shared.engine.users_of(revision.digest)
            if self._name_of(request_id) == call.name
        ]
        deadline = time.monotonic() + call.seconds
        self._drains[call.name] = _Drain(requests, deadline, call.remove)
        hold = Hold.LEAVING if call.remove else Hold.HELD
        self._record(call, revision, partial(self._shared.loader.hold, call.name, hold))

    def resume(self, call: ResumeAdapter) -> None:
        """Give a name requests again."""
        revision = self.find(call.name)
        self._shared.registry.release(call.name)
        self._drains.pop(call.name, None)
        self._record(call, revision, partial(self._shared.loader.hold, call.name, Hold.NONE))

    def gone(self, name: str) -> None:
        """A name means nothing any more."""
        self._pinned.discard(name)
        self._drains.pop(name, None)

    def find(self, name: str) -> RevisionCard:
        """What a name means.

        Raises:
            CallError: nothing.
        """
        revision = self._shared.registry.adapters.get(name)
        if revision is None:
            raise CallError("adapter_not_found", f"adapter {shown(name)} is not loaded")
        return revision

    def turn(self) -> list[Failed]:
        """End what has drained; the requests that had to be ended."""
        ended: list[Failed] = []
        for name, drain in list(self._drains.items()):
            ended += self._advance(name, drain)
        return ended

    def _advance(self, name: str, drain: _Drain) -> list[Failed]:
        engine = self._shared.engine
        left = [request_id for request_id in drain.requests if request_id in engine.requests]
        if left and time.monotonic() <= drain.deadline:
            return []
        for request_id in left:
            engine.abort(request_id)
        if not drain.remove or self._remove(name):
            self._drains.pop(name, None)
        text = f"adapter {shown(name)} is drained and the request took too long"
        return [Failed(request_id=each, code="adapter_draining", message=text) for each in left]

    def _name_of(self, request_id: str) -> str | None:
        """The name that a request asked for, if it is still there."""
        try:
            return self._shared.registry.find(self._shared.engine.requests[request_id].model).name
        except UnknownModel:
            return None

    def _record(self, call: NameCall, revision: RevisionCard, write: Callable[[], LetGo]) -> None:
        """Write what has been done, and answer; to last it needs a name that the store knows."""
        write_back = self._dirty.begin(call.name)
        users = self._shared.engine.users_of(revision.digest)
        reply = AdapterReply(call_id=call.call_id, revision=revision.digest, requests=len(users))
        self._recording.begin(write, reply, write_back)
