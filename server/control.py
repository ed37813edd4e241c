"""The control plane: adapters come and go. Bodies as clients of vLLM send them.

POST /v1/load_lora_adapter     {"lora_name", "lora_path", "load_inplace"?}
POST /v1/unload_lora_adapter   {"lora_name"}
"""

from __future__ import annotations

import uuid

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from server.body import read_body
from server.errors import ApiError, Conflict, InvalidRequest, Unavailable, UnknownModel
from server.services import services_of
from tp_engine.messages import (
    AdapterReply,
    AdapterStatus,
    ListAdapters,
    LoadAdapter,
    MoveAdapter,
    UnloadAdapter,
)

router = APIRouter()


class LoadFields(msgspec.Struct, frozen=True, kw_only=True):
    """Body of a load."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadFields(msgspec.Struct, frozen=True, kw_only=True):
    """Body of an unload."""

    lora_name: str
    lora_int_id: int | None = None
    """Sent by some clients; names tell adapters apart here."""


class PromoteFields(msgspec.Struct, frozen=True, kw_only=True):
    """Body of a promotion."""

    revision: str


class AdapterPage(msgspec.Struct, frozen=True, kw_only=True):
    """Some adapters; ``after`` the last one's name comes the next page."""

    adapters: list[AdapterStatus]


class Done(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What was done."""

    message: str
    lora_name: str
    revision: str
    """SHA-256 of the adapter's canonical config and tensors, in hex."""
    modules_applied: int = 0
    modules_expected: int = 0
    warnings: list[str] = []


MAX_PAGE = 1000
"""Most adapters of a page."""

_promote_decoder = msgspec.json.Decoder(PromoteFields)
_load_decoder = msgspec.json.Decoder(LoadFields)
_unload_decoder = msgspec.json.Decoder(UnloadFields)


@router.post("/v1/load_lora_adapter")
async def load(request: Request) -> Response:
    """Load an adapter; answers when requests may use it."""
    fields = await read_body(request, _load_decoder.decode)
    call = LoadAdapter(
        call_id=uuid.uuid4().hex,
        name=fields.lora_name,
        path=fields.lora_path,
        in_place=fields.load_inplace,
    )
    return await _do(request, call, "added")


@router.post("/v1/unload_lora_adapter")
async def unload(request: Request) -> Response:
    """Unload an adapter; requests that run go on, new ones get 404."""
    fields = await read_body(request, _unload_decoder.decode)
    call = UnloadAdapter(call_id=uuid.uuid4().hex, name=fields.lora_name)
    return await _do(request, call, "removed")


@router.get("/admin/adapters")
async def adapters(request: Request) -> Response:
    """List a page of adapters."""
    limit = _limit(request.query_params.get("limit", "100"))
    call = ListAdapters(
        call_id=uuid.uuid4().hex, after=request.query_params.get("after", ""), limit=limit
    )
    return _json(AdapterPage(adapters=await _list(request, call)))


@router.get("/admin/adapters/{name:path}")
async def adapter(request: Request, name: str) -> Response:
    """Show one adapter."""
    found = await _list(request, ListAdapters(call_id=uuid.uuid4().hex, name=name))
    if not found:
        raise UnknownModel(
            f"adapter {name!r} is not loaded", param="name", code="adapter_not_found"
        )
    return _json(found[0])


@router.delete("/admin/adapters/{name:path}")
async def delete(request: Request, name: str) -> Response:
    """Unload an adapter, for good."""
    return await _do(request, UnloadAdapter(call_id=uuid.uuid4().hex, name=name), "removed")


@router.post("/admin/adapters/{name:path}/promote")
async def promote(request: Request, name: str) -> Response:
    """Let a name mean a revision of the store."""
    fields = await read_body(request, _promote_decoder.decode)
    call = MoveAdapter(call_id=uuid.uuid4().hex, name=name, revision=fields.revision)
    return await _do(request, call, "promoted")


@router.post("/admin/adapters/{name:path}/roll_back")
async def roll_back(request: Request, name: str) -> Response:
    """Let a name mean what it meant before its last move."""
    call = MoveAdapter(call_id=uuid.uuid4().hex, name=name, revision=None)
    return await _do(request, call, "rolled back")


def _limit(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MAX_PAGE:
        raise InvalidRequest(f"limit={text!r} must be from 1 to {MAX_PAGE}", param="limit")
    return int(text)


async def _list(request: Request, call: ListAdapters) -> list[AdapterStatus]:
    answer = await services_of(request).client.call(call)
    if isinstance(answer, AdapterReply):
        raise _error(answer.code or "", answer.message)
    return answer.adapters


async def _do(
    request: Request, call: LoadAdapter | MoveAdapter | UnloadAdapter, what: str
) -> Response:
    reply, name = await services_of(request).client.call(call), call.name
    assert isinstance(reply, AdapterReply)
    if reply.code is not None:
        raise _error(reply.code, reply.message)
    assert reply.revision is not None
    done = Done(
        message=f"Success: LoRA adapter {name!r} {what} successfully.",
        lora_name=name,
        revision=reply.revision,
        modules_applied=reply.applied,
        modules_expected=reply.expected,
        warnings=reply.warnings,
    )
    return _json(done)


def _json(body: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")


def _error(code: str, message: str) -> ApiError:
    if code in ("adapter_not_found", "unknown_name"):
        return UnknownModel(message, param="lora_name", code="adapter_not_found")
    if code in ("unknown_revision", "not_ready", "nothing_before", "no_store"):
        return InvalidRequest(message, param="revision", code=code)
    if code == "adapter_loading":
        return Conflict(message, param="lora_name", code=code)
    if code == "shutting_down":
        return Unavailable(message, code=code)
    if code == "store_failed":
        return ApiError(message, code=code)
    param = "lora_name" if code in ("name_refused", "adapter_exists") else "lora_path"
    return InvalidRequest(message, param=param, code=code)
