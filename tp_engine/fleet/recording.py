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
        self._under_way: list[tuple[AdapterReply | None, Future[LetGo], Future[LetGo] | None]] = []

    @property
    def busy(self) -> bool:
        """Whether `turn` has something to wait for."""
        return bool(self._under_way)

    def begin(
        self,
        write: Callable[[], LetGo],
        reply: AdapterReply | None,
        write_back: Future[LetGo] | None = None,
    ) -> None:
        """Begin to write what has been done already, and answer so, if at all, when it is.

        Args:
            write: called by the recorder, after what was begun before.
            reply: None: nobody waits for it.
            write_back: that must have ended too, as until then the store does not know the name.
        """
        self._under_way.append((reply, self._shared.recorder.submit(write), write_back))

    def turn(self) -> list[AdapterReply]:
        """The answers to what is written."""
        replies = []
        for entry in list(self._under_way):
            reply, written, write_back = entry
            if not written.done() or not (write_back is None or write_back.done()):
                continue
            self._under_way.remove(entry)
            error = self._take(written) or _error(write_back)
            if error:
                log.error("the adapter store does not have a change: %s", error)
            if reply is not None and error:
                reply = refusal(reply.call_id, "store_failed", f"done, but not for good: {error}")
            if reply is not None:
                replies.append(reply)
        return replies

    def _take(self, written: Future[LetGo]) -> str:
        """Why it failed; empty if it is written."""
        error = _error(written)
        if not error:
            self._leaving.discard(written.result())
        return error


def _error(written: Future[LetGo] | None) -> str:
    """Why it failed; empty if it did not."""
    error = None if written is None else written.exception()
    if error is None:
        return ""
    if not isinstance(error, (ValueError, OSError)):
        raise error
    return str(error) or type(error).__name__
