"""Adapters that are brought up before anybody asks for them."""

from __future__ import annotations

from dataclasses import dataclass

from tp_engine.adapters import RevisionCard
from tp_engine.adapters.errors import shown
from tp_engine.fleet.shared import Shared, refusal
from tp_engine.memory import AdapterFootprint
from tp_engine.messages import AdapterReply, PreloadAdapter
from tp_engine.tiers.tiers import Stand


@dataclass(slots=True, eq=False)
class _Preload:
    """One on its way; meanwhile nobody takes the host copy away again."""

    call: PreloadAdapter
    adapter: AdapterFootprint
    asked: bool = False
    """Whether it has been told to be fetched."""
    copying: bool = False
    """Likewise to be copied into the arena."""


class Preloading:
    """The preloads under way."""

    def __init__(self, shared: Shared) -> None:
        """Begin with none."""
        self._shared = shared
        self._open: list[_Preload] = []

    @property
    def busy(self) -> bool:
        """Whether `turn` has something to wait for."""
        return bool(self._open)

    def begin(self, call: PreloadAdapter, revision: RevisionCard) -> None:
        """Begin to bring up what a name means now."""
        adapter = self._shared.engine.adapters[revision.digest]
        self._shared.engine.books.demand.hold(adapter.handle)
        self._open.append(_Preload(call, adapter))

    def turn(self) -> list[AdapterReply]:
        """Go on with each; the answers to what is over."""
        replies = []
        for preload in list(self._open):
            reply = self._advance(preload)
            if reply is not None:
                self._open.remove(preload)
                replies.append(reply)
        return replies

    def _advance(self, preload: _Preload) -> AdapterReply | None:
        call, adapter, engine = preload.call, preload.adapter, self._shared.engine
        if engine.adapters.get(adapter.digest) is not adapter:
            text = f"adapter {shown(call.name)} went before it was preloaded"
            return refusal(call.call_id, "adapter_not_found", text)
        reply = self._bring(preload)
        if reply is not None:
            engine.books.demand.release(adapter.handle)
        return reply

    def _bring(self, preload: _Preload) -> AdapterReply | None:
        call, adapter, engine = preload.call, preload.adapter, self._shared.engine
        if not engine.tiers.is_at_hand(adapter.handle):
            return self._fetch(preload)
        stand = Stand.READY
        if preload.copying and engine.residency.find(adapter.handle) is None:
            text = f"adapter {shown(call.name)} does not stay in the arena: see the server's log"
            return refusal(call.call_id, "no_room", text)
        if call.arena:
            stand = engine.tiers.bring(adapter, spare=len(engine.scheduler.running))
            preload.copying = stand is Stand.COMING
        if stand is Stand.NO_ROOM:
            text = f"what runs leaves no {adapter.pages} pages for adapter {shown(call.name)}"
            return refusal(call.call_id, "no_room", text)
        if stand is Stand.COMING:
            return None
        return AdapterReply(call_id=call.call_id, revision=adapter.digest)

    def _fetch(self, preload: _Preload) -> AdapterReply | None:
        tiers, adapter = self._shared.engine.tiers, preload.adapter
        if tiers.fetcher.is_on_it(adapter.handle) or tiers.host.is_coming(adapter.handle):
            return None
        if preload.asked:
            text = f"adapter {shown(preload.call.name)} cannot be read: see the server's log"
            return refusal(preload.call.call_id, "unreadable", text)
        preload.asked = True
        tiers.want(adapter)
        return None
