"""Calls that are answered once the store knows."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future

from tp_engine.fleet.errands import LetGo
from tp_engine.fleet.leaving import Leaving
from tp_engine.fleet.shared import Shared, refusal
from tp_engine.messages import AdapterReply

log = logging.getLogger(__name__)


class Recording:
    """What is being written, in the order of the calls."""

    def __init__(self, shared: Shared, leaving: Leaving) -> None:
        """Begin with nothing."""
        self._shared = shared
        self._leaving = leaving
        self._under_way: list[tuple[AdapterReply | None, Future[LetGo]]] = []

    @property
    def busy(self) -> bool:
        """Whether `turn` has something to wait for."""
        return bool(self._under_way)

    def begin(self, write: Callable[[], LetGo], reply: AdapterReply | None) -> None:
        """Begin to write what has been done already, and answer so, if at all, when it is."""
        self._under_way.append((reply, self._shared.reader.submit(write)))

    def turn(self) -> list[AdapterReply]:
        """The answers to what is written."""
        replies = []
        while self._under_way and self._under_way[0][1].done():
            reply, written = self._under_way.pop(0)
            error = self._take(written)
            if error:
                log.error("the adapter store does not have a change: %s", error)
            if reply is not None and error:
                reply = refusal(reply.call_id, "store_failed", f"done, but not for good: {error}")
            if reply is not None:
                replies.append(reply)
        return replies

    def _take(self, written: Future[LetGo]) -> str:
        """Why it failed; empty if it is written."""
        try:
            self._leaving.discard(written.result())
        except (ValueError, OSError) as error:
            return str(error) or type(error).__name__
        return ""
