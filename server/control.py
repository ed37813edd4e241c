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
from tp_engine.messages import AdapterReply, LoadAdapter, UnloadAdapter

router = APIRouter(prefix="/v1")


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


class Done(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What was done."""

    message: str
    lora_name: str
    revision: str
    """SHA-256 of the adapter's canonical config and tensors, in hex."""
    modules_applied: int = 0
    modules_expected: int = 0
    warnings: list[str] = []


_load_decoder = msgspec.json.Decoder(LoadFields)
_unload_decoder = msgspec.json.Decoder(UnloadFields)


@router.post("/load_lora_adapter")
async def load(request: Request) -> Response:
    """Load an adapter; answers when requests may use it."""
    fields = await read_body(request, _load_decoder.decode)
    call = LoadAdapter(
        call_id=uuid.uuid4().hex,
        name=fields.lora_name,
        path=fields.lora_path,
        in_place=fields.load_inplace,
    )
    return _done("added", fields.lora_name, await services_of(request).client.call(call))


@router.post("/unload_lora_adapter")
async def unload(request: Request) -> Response:
    """Unload an adapter; requests that run go on, new ones get 404."""
    fields = await read_body(request, _unload_decoder.decode)
    call = UnloadAdapter(call_id=uuid.uuid4().hex, name=fields.lora_name)
    return _done("removed", fields.lora_name, await services_of(request).client.call(call))


def _done(what: str, name: str, reply: AdapterReply) -> Response:
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
    return Response(msgspec.json.encode(done), media_type="application/json")


def _error(code: str, message: str) -> ApiError:
    if code == "adapter_not_found":
        return UnknownModel(message, param="lora_name", code=code)
    if code == "adapter_loading":
        return Conflict(message, param="lora_name", code=code)
    if code == "shutting_down":
        return Unavailable(message, code=code)
    if code == "store_failed":
        return ApiError(message, code=code)
    param = "lora_name" if code in ("name_refused", "adapter_exists") else "lora_path"
    return InvalidRequest(message, param=param, code=code)
