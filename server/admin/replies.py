"""Having the engine do something about adapters, and telling what became of it."""

from __future__ import annotations

import msgspec
from fastapi import Request
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from server.errors import (
    ApiError,
    Conflict,
    InvalidRequest,
    SourceFailed,
    Unavailable,
    UnknownModel,
)
from server.services import services_of
from tp_engine.messages import AdapterReply, LoadAdapter, MoveAdapter, NameCall, UnloadAdapter

MAX_PAGE = 1000
"""Most entries of a page."""

_REVISION_CODES = frozenset(
    {"unknown_revision", "ambiguous_revision", "not_ready", "nothing_before", "no_store"}
)


class Done(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What was done."""

    message: str
    lora_name: str
    revision: str
    """SHA-256 of the adapter's canonical config and tensors, in hex."""
    modules_applied: int = 0
    modules_expected: int = 0
    warnings: list[str] = []
    durable: bool | UnsetType = UNSET
    """Of a push: whether the store has it, so that it survives a kill."""
    requests: int = 0
    """Open requests of its revision."""


async def carry_out(
    request: Request, call: LoadAdapter | MoveAdapter | NameCall | UnloadAdapter, what: str
) -> Response:
    """Make a call and answer with `Done`; ``what`` happened then.

    Raises:
        ApiError: the call was refused.
    """
    reply = await services_of(request).client.call(call)
    assert isinstance(reply, AdapterReply)
    return as_json(done(reply, call.name, what))


def done(reply: AdapterReply, name: str, what: str) -> Done:
    """What the engine has done about an adapter; ``what`` happened.

    Raises:
        ApiError: it refused.
    """
    if reply.code is not None:
        raise refusal(reply.code, reply.message)
    assert reply.revision is not None
    return Done(
        message=f"Success: LoRA adapter {name!r} {what} successfully.",
        lora_name=name,
        revision=reply.revision,
        modules_applied=reply.applied,
        modules_expected=reply.expected,
        warnings=list(reply.warnings),
        durable=UNSET if reply.durable is None else reply.durable,
        requests=reply.requests,
    )


def as_json(body: msgspec.Struct, status: int = 200) -> Response:
    """A response with a body of JSON."""
    return Response(msgspec.json.encode(body), status, media_type="application/json")


def page_limit(request: Request) -> int:
    """How many entries a page may have.

    Raises:
        InvalidRequest: another number than is allowed.
    """
    text = request.query_params.get("limit", "100")
    # int() itself refuses more than some thousand digits.
    if not (text.isdecimal() and len(text) <= 9 and 1 <= int(text) <= MAX_PAGE):
        raise InvalidRequest(f"limit={text[:80]!r} must be from 1 to {MAX_PAGE}", param="limit")
    return int(text)


def refusal(code: str, message: str) -> ApiError:
    """The error for what the engine or a source refuses, by its ``code``."""
    if code in ("adapter_not_found", "unknown_name"):
        return UnknownModel(message, param="name", code="adapter_not_found")
    if code in _REVISION_CODES:
        return InvalidRequest(message, param="revision", code=code)
    if code == "adapter_loading":
        return Conflict(message, param="name", code=code)
    if code in ("shutting_down", "no_room", "out_of_memory"):
        return Unavailable(message, code=code)
    if code == "store_failed":
        return ApiError(message, code=code)
    if code == "source_failed":
        return SourceFailed(message)
    param = "name" if code in ("name_refused", "adapter_exists") else "source"
    return InvalidRequest(message, param=param, code=code)
