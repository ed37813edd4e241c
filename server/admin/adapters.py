"""The adapters as a resource.

GET    /admin/adapters                   a page of them
GET    /admin/adapters/NAME              one
DELETE /admin/adapters/NAME              unload it, for good
POST   /admin/adapters/NAME/promote      {"revision"}
POST   /admin/adapters/NAME/roll_back
"""

from __future__ import annotations

import uuid

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from server.admin.replies import as_json, carry_out, refusal
from server.body import read_body
from server.errors import InvalidRequest, UnknownModel
from server.services import services_of
from tp_engine.messages import (
    AdapterList,
    AdapterReply,
    AdapterStatus,
    ListAdapters,
    MoveAdapter,
    UnloadAdapter,
)

router = APIRouter(prefix="/admin/adapters")

MAX_PAGE = 1000
"""Most adapters of a page."""


class PromoteFields(msgspec.Struct, frozen=True, kw_only=True):
    """Body of a promotion."""

    revision: str


class AdapterPage(msgspec.Struct, frozen=True, kw_only=True):
    """Some adapters; ``after`` the last one's name comes the next page."""

    adapters: list[AdapterStatus]


_promote_decoder = msgspec.json.Decoder(PromoteFields)


@router.get("")
async def adapters(request: Request) -> Response:
    """List a page of adapters."""
    limit = _limit(request.query_params.get("limit", "100"))
    call = ListAdapters(
        call_id=uuid.uuid4().hex, after=request.query_params.get("after", ""), limit=limit
    )
    return as_json(AdapterPage(adapters=await _list(request, call)))


@router.get("/{name:path}")
async def adapter(request: Request, name: str) -> Response:
    """Show one adapter."""
    found = await _list(request, ListAdapters(call_id=uuid.uuid4().hex, name=name))
    if not found:
        raise UnknownModel(
            f"adapter {name!r} is not loaded", param="name", code="adapter_not_found"
        )
    return as_json(found[0])


@router.delete("/{name:path}")
async def delete(request: Request, name: str) -> Response:
    """Unload an adapter, for good."""
    return await carry_out(request, UnloadAdapter(call_id=uuid.uuid4().hex, name=name), "removed")


@router.post("/{name:path}/promote")
async def promote(request: Request, name: str) -> Response:
    """Let a name mean a revision of the store."""
    fields = await read_body(request, _promote_decoder.decode)
    call = MoveAdapter(call_id=uuid.uuid4().hex, name=name, revision=fields.revision)
    return await carry_out(request, call, "promoted")


@router.post("/{name:path}/roll_back")
async def roll_back(request: Request, name: str) -> Response:
    """Let a name mean what it meant before its last move."""
    call = MoveAdapter(call_id=uuid.uuid4().hex, name=name, revision=None)
    return await carry_out(request, call, "rolled back")


def _limit(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MAX_PAGE:
        raise InvalidRequest(f"limit={text!r} must be from 1 to {MAX_PAGE}", param="limit")
    return int(text)


async def _list(request: Request, call: ListAdapters) -> list[AdapterStatus]:
    answer = await services_of(request).client.call(call)
    if isinstance(answer, AdapterReply):
        raise refusal(answer.code or "", answer.message)
    assert isinstance(answer, AdapterList)
    return answer.adapters
