"""Which adapters there are: what the engine knows, and what is on its way to it."""

from __future__ import annotations

import time
import uuid
from typing import Final, get_args

import msgspec
from fastapi import Request

from server.admin.operations import OPEN_STATES, Operation
from server.admin.replies import page_limit, refusal
from server.errors import InvalidRequest
from server.services import services_of
from tp_engine.messages import (
    AdapterList,
    AdapterReply,
    AdapterState,
    AdapterStatus,
    ListAdapters,
)

FAILED_SECONDS: Final = 3600.0
"""How long a name that was never served is listed because its load has failed."""
_ARRIVING: Final = ("fetching", "verifying")


class AdapterPage(msgspec.Struct, frozen=True, kw_only=True):
    """Some adapters; ``after`` the last one's name comes the next page."""

    adapters: list[AdapterStatus]


async def page(request: Request) -> AdapterPage:
    """The page that a request's query asks for: ``after``, ``limit``, ``prefix``, ``state``,
    ``base``."""
    asked, limit = request.query_params, page_limit(request)
    call = ListAdapters(
        call_id=uuid.uuid4().hex,
        limit=limit,
        **{field: asked.get(field, "") for field in ("after", "prefix", "state", "base")},
    )
    if call.state and call.state not in get_args(AdapterState):
        allowed = ", ".join(get_args(AdapterState))
        raise InvalidRequest(f"state={call.state!r} must be one of {allowed}", param="state")
    known = [] if call.state in _ARRIVING else await _ask(request, call)
    served = _served(request) if call.state else set()  # these have another state
    arriving = {} if call.base else _arriving(request)
    wanted = {
        name: status
        for name, status in arriving.items()
        if name > call.after
        and name.startswith(call.prefix)
        and call.state in ("", status.state)
        and name not in served
    }
    return AdapterPage(adapters=_merged(known, wanted)[:limit])


async def find(request: Request, name: str) -> AdapterStatus | None:
    """One adapter with its manifest, None if there is none."""
    known = await _ask(request, ListAdapters(call_id=uuid.uuid4().hex, name=name))
    arriving = {key: status for key, status in _arriving(request).items() if key == name}
    merged = _merged(known, arriving)
    return merged[0] if merged else None


async def _ask(request: Request, call: ListAdapters) -> list[AdapterStatus]:
    answer = await services_of(request).client.call(call)
    if isinstance(answer, AdapterReply):
        raise refusal(answer.code or "", answer.message)
    assert isinstance(answer, AdapterList)
    return answer.adapters


def _arriving(request: Request) -> dict[str, AdapterStatus]:
    """What the last operation of each name says, where it is open or has failed."""
    latest = services_of(request).loads.operations.latest()
    served = _served(request)
    return {
        name: _status(operation)
        for name, operation in latest.items()
        if operation.state in OPEN_STATES or (_has_failed(operation) and name not in served)
    }


def _served(request: Request) -> set[str]:
    return {card.name for card in services_of(request).client.require_serving().models}


def _has_failed(operation: Operation) -> bool:
    """To bring a new name, and lately: operations tell of all other failures."""
    lately = time.time() - (operation.ended or 0.0) < FAILED_SECONDS
    return operation.state == "failed" and lately and not operation.replaces


def _status(operation: Operation) -> AdapterStatus:
    state: AdapterState = "failed"
    if operation.state == "fetching" or operation.state == "verifying":
        state = operation.state
    return AdapterStatus(
        name=operation.name,
        state=state,
        reason="" if operation.error is None else operation.error.message,
        operation=operation.id,
        source=operation.source,
    )


def _merged(known: list[AdapterStatus], arriving: dict[str, AdapterStatus]) -> list[AdapterStatus]:
    """All, in the order of their names; what is served stays so while its successor arrives."""
    found = dict(arriving)
    for status in known:
        coming = arriving.get(status.name)
        if coming is not None and status.state == "failed":
            continue
        operation = None if coming is None else coming.operation
        found[status.name] = msgspec.structs.replace(status, operation=operation)
    return [found[name] for name in sorted(found)]
