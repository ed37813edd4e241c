"""What takes long is an operation: it is begun, watched, and sometimes cancelled.

    fetching ─> verifying ─> ready | failed        (cancelled: only while fetching)
    preloading ─> ready | failed

The engine does the verifying: it keeps, checks and hands out what was fetched. It also preloads.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Literal, get_args

import msgspec
from starlette.responses import Response

from server.admin.replies import Done, as_json
from server.errors import ApiError, Conflict, ErrorDetail, InvalidRequest, Unavailable, UnknownModel
from tp_engine.sources import FetchProgress

log = logging.getLogger(__name__)

OperationState = Literal["fetching", "verifying", "preloading", "ready", "failed", "cancelled"]
OPEN_STATES: Final = ("fetching", "verifying", "preloading")
MAX_OPEN: Final = 256
"""Operations that may be open."""
MAX_ENDED: Final = 1000
"""Ended ones that are remembered."""


class OperationStatus(msgspec.Struct, frozen=True, kw_only=True):
    """An operation as clients see it."""

    id: str
    name: str
    """Of the adapter."""
    source: str
    state: OperationState
    bytes_done: int
    bytes_total: int | None
    """None: not known yet, or nothing is fetched."""
    created: float
    """Unix seconds."""
    ended: float | None
    result: Done | None
    """Once ready."""
    error: ErrorDetail | None
    """Once failed."""


class OperationPage(msgspec.Struct, frozen=True, kw_only=True):
    """Some operations, the oldest first; ``after`` the last one's id comes the next page."""

    operations: list[OperationStatus]


@dataclass(slots=True, eq=False)
class Operation:
    """One operation; its own task changes it."""

    id: str
    name: str
    source: str
    state: OperationState
    arrives: bool = True
    """Whether it brings an adapter; else that is there already."""
    replaces: bool = False
    """Whether the name meant another one when it began."""
    progress: FetchProgress = field(default_factory=FetchProgress)
    created: float = field(default_factory=time.time)
    ended: float | None = None
    result: Done | None = None
    error: ApiError | None = None
    task: asyncio.Task[None] | None = None

    def end(self, state: OperationState) -> None:
        """Take the last state, and when that was: clients see both or neither."""
        self.state, self.ended = state, time.time()

    def status(self) -> OperationStatus:
        """What clients see now."""
        return OperationStatus(
            id=self.id,
            name=self.name,
            source=self.source,
            state=self.state,
            bytes_done=self.progress.done,
            bytes_total=self.progress.total,
            created=self.created,
            ended=self.ended,
            result=self.result,
            error=None if self.error is None else self.error.body.error,
        )

    async def finished(self) -> Done:
        """Wait for the end; the operation goes on when the waiting is cancelled.

        Raises:
            ApiError: it failed, or was cancelled.
        """
        assert self.task is not None
        await asyncio.wait({self.task})
        if self.error is not None:
            raise self.error
        if self.result is None:
            raise Conflict(f"operation {self.id} was cancelled", code="cancelled")
        return self.result


def accepted(operation: Operation) -> Response:
    """The answer to who has begun an operation."""
    response = as_json(operation.status(), 202)
    response.headers["location"] = f"/admin/operations/{operation.id}"
    return response


Work = Callable[[Operation], Awaitable[Done]]


class Operations:
    """The open operations, at most one a name, and the last ended ones."""

    def __init__(self) -> None:
        self._all: dict[str, Operation] = {}
        self._numbers = itertools.count(1)

    def begin(
        self, name: str, source: str, state: OperationState, work: Work, *, replaces: bool = False
    ) -> Operation:
        """Begin an operation; ``work`` may move its state, and ends it.

        Raises:
            Conflict: another one of this name is open.
            Unavailable: too many are open.
        """
        self.check_free(name)
        number = f"op-{next(self._numbers)}-{secrets.token_hex(4)}"
        arrives = state != "preloading"
        operation = Operation(number, name, source, state, arrives=arrives, replaces=replaces)
        self._all[operation.id] = operation
        operation.task = asyncio.create_task(_run(operation, work))
        operation.task.add_done_callback(partial(self._ended, operation))
        return operation

    def check_free(self, name: str) -> None:
        """Raise as `begin` does."""
        running = [each for each in self._all.values() if each.state in OPEN_STATES]
        for operation in running:
            if operation.name == name:
                text = f"adapter {name!r} is being loaded already: operation {operation.id}"
                raise Conflict(text, param="name", code="adapter_loading")
        if len(running) >= MAX_OPEN:
            raise Unavailable(f"{MAX_OPEN} operations are open; that is the limit")

    def find(self, number: str) -> Operation:
        """An operation by its id.

        Raises:
            UnknownModel: there is none, or it has been forgotten.
        """
        operation = self._all.get(number)
        if operation is None:
            text = f"there is no operation {number!r}, or it ended long ago"
            raise UnknownModel(text, param="id", code="operation_not_found")
        return operation

    def page(self, after: str, limit: int, state: str, name: str) -> OperationPage:
        """Operations in the order of their beginnings, those past the one named ``after``.

        Args:
            state: only these; empty: all.
            name: only those of this adapter; empty: of all.
        """
        if state and state not in get_args(OperationState):
            allowed = ", ".join(get_args(OperationState))
            raise InvalidRequest(f"state={state!r} must be one of {allowed}", param="state")
        found = list(self._all.values())
        if after:
            found = found[found.index(self.find(after)) + 1 :]
        found = [each for each in found if state in ("", each.state) and name in ("", each.name)]
        return OperationPage(operations=[each.status() for each in found[:limit]])

    def latest(self) -> dict[str, Operation]:
        """The last operation that has brought each name, or is to."""
        return {each.name: each for each in self._all.values() if each.arrives}

    def cancel(self, number: str) -> Operation:
        """End a fetch; harmless when it has ended.

        Raises:
            UnknownModel: as `find`.
            Conflict: the engine is at it, which cannot be cancelled.
        """
        operation = self.find(number)
        if operation.state in ("verifying", "preloading"):
            text = f"operation {number} is {operation.state}: unload the adapter when that is done"
            raise Conflict(text, param="id", code="not_cancellable")
        if operation.state == "fetching":
            assert operation.task is not None
            operation.task.cancel()
        return operation

    async def close(self) -> None:
        """Cancel all; what was fetched stays for the next start."""
        tasks = [each.task for each in self._all.values() if each.state in OPEN_STATES]
        for task in tasks:
            assert task is not None
            task.cancel()
        await asyncio.gather(*(task for task in tasks if task is not None), return_exceptions=True)

    def _ended(self, operation: Operation, task: asyncio.Task[None]) -> None:
        """Also of a task that was cancelled before it began."""
        if task.cancelled():
            operation.end("cancelled")
        ended = [each.id for each in self._all.values() if each.state not in OPEN_STATES]
        for number in ended[: max(0, len(ended) - MAX_ENDED)]:
            del self._all[number]


async def _run(operation: Operation, work: Work) -> None:
    try:
        operation.result = await work(operation)
        operation.end("ready")
    except ApiError as error:
        operation.error = error
        operation.end("failed")
    except Exception:
        log.exception("operation %s failed", operation.id)
        operation.error = ApiError("internal error; the server's log has the details")
        operation.end("failed")
