"""The outputs of one HTTP request's engine requests, between the socket and the HTTP stream.

Each engine request has room for one unread `Output`; what arrives before it is read is merged
into it. A slow reader therefore delays nobody; one that leaves too much unread loses the rest.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Final

import msgspec

from server.errors import failure
from tp_engine.messages import Admitted, Failed, Output

MAX_UNREAD: Final = 2**22
"""Most tokens and log-probabilities of a group that wait to be read: some 300 MB."""


def size(output: Output) -> int:
    """Tokens and log-probabilities of an output."""
    reports = sum(1 + len(entry.top_ids) for entry in output.logprobs or ())
    return len(output.tokens) + reports


def merge(first: Output, second: Output) -> Output:
    """Two consecutive outputs of one request as one."""
    logprobs = None
    if first.logprobs is not None or second.logprobs is not None:
        logprobs = [*(first.logprobs or ()), *(second.logprobs or ())]
    return msgspec.structs.replace(second, tokens=first.tokens + second.tokens, logprobs=logprobs)


class Batch:
    """An asynchronous iterator of ``(index, Output)`` over a group of engine requests.

    Ends when every request has ended. Raises `ApiError` when one fails; the group is lost with
    it. Use as a context manager: requests still open at the end are aborted.
    """

    def __init__(
        self, request_ids: Sequence[str], on_closed: Callable[[str, bool | None], None]
    ) -> None:
        """Wait for the outputs of ``request_ids``, given in index order.

        ``on_closed`` is called once per request with its id, and with None when the engine ended
        it, else with the ``finished`` flag of the `Abort` that is due.
        """
        self._index = {request_id: index for index, request_id in enumerate(request_ids)}
        self._ids = tuple(request_ids)
        self._open = set(request_ids)
        self._on_closed = on_closed
        self._unread: dict[str, Output] = {}
        self._waiting = 0  # size of what is unread
        self._failed: Failed | None = None
        self._arrived = asyncio.Event()
        self.revision: str | None = None
        """What answers, once the engine has said so: the same for the whole group."""
        self.first = self.last = 0.0
        """When the first output came, and the latest one, by ``time.perf_counter``."""

    def deliver(self, message: Admitted | Output | Failed) -> None:
        """Take a message from the engine for one of the requests; never waits."""
        if isinstance(message, Admitted):
            self.revision = message.revision
            return
        if isinstance(message, Failed):
            self._failed = self._failed or message
        else:
            unread = self._unread.get(message.request_id)
            merged = message if unread is None else merge(unread, message)
            self._unread[message.request_id] = merged
            self._waiting += size(message)
            self.last = time.perf_counter()
            self.first = self.first or self.last
        if isinstance(message, Failed) or message.finish_reason is not None:
            self._end(message.request_id, None)
        if self._waiting > MAX_UNREAD:
            self._give_up(message.request_id)
        self._arrived.set()

    def finish(self, index: int) -> None:
        """End one request early, with success: a stop string was found."""
        if (surplus := self._unread.pop(self._ids[index], None)) is not None:
            self._waiting -= size(surplus)
        self._end(self._ids[index], True)
        self._arrived.set()

    def close(self) -> None:
        """Abort what is still open. Harmless when repeated."""
        for request_id in self._ids:
            self._end(request_id, False)

    def _give_up(self, request_id: str) -> None:
        text = f"{self._waiting} tokens and log-probabilities wait to be read: at most {MAX_UNREAD}"
        self._failed = Failed(request_id=request_id, code="not_read", message=text)
        self._unread.clear()
        self._waiting = 0
        self.close()

    def _end(self, request_id: str, finished: bool | None) -> None:
        if request_id in self._open:
            self._open.remove(request_id)
            self._on_closed(request_id, finished)

    def __enter__(self) -> Batch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __aiter__(self) -> Batch:
        return self

    async def __anext__(self) -> tuple[int, Output]:
        while True:
            if self._failed is not None:
                raise failure(self._failed.code, self._failed.message, self._failed.param)
            if self._unread:
                # The longest unread first, so that no index of a busy group is starved.
                request_id = next(iter(self._unread))
                output = self._unread.pop(request_id)
                self._waiting -= size(output)
                return self._index[request_id], output
            if not self._open:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
