"""Having the engine do something about adapters, and telling what became of it."""

from __future__ import annotations

import msgspec
from fastapi import Request
from starlette.responses import Response

from server.errors import ApiError, Conflict, InvalidRequest, Unavailable, UnknownModel
from server.services import services_of
from tp_engine.messages import AdapterReply, LoadAdapter, MoveAdapter, NameCall, UnloadAdapter


class Done(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What was done."""

    message: str
    lora_name: str
    revision: str
    """SHA-256 of the adapter's canonical config and tensors, in hex."""
    modules_applied: int = 0
    modules_expected: int = 0
    warnings: list[str] = []
    requests: int = 0
    """Open requests of its revision."""


async def carry_out(
    request: Request, call: LoadAdapter | MoveAdapter | NameCall | UnloadAdapter, what: str
) -> Response:
    """Make a call and answer with `Done`; ``what`` happened then.

    Raises:
        ApiError: the call was refused.
    """
    reply, name = await services_of(request).client.call(call), call.name
    assert isinstance(reply, AdapterReply)
    if reply.code is not None:
        raise refusal(reply.code, reply.message)
    assert reply.revision is not None
    done = Done(
        message=f"Success: LoRA adapter {name!r} {what} successfully.",
        lora_name=name,
        revision=reply.revision,
        modules_applied=reply.applied,
        modules_expected=reply.expected,
        warnings=list(reply.warnings),
        requests=reply.requests,
    )
    return as_json(done)


def as_json(body: msgspec.Struct, status: int = 200) -> Response:
    """A response with a body of JSON."""
    return Response(msgspec.json.encode(body), status, media_type="application/json")


def refusal(code: str, message: str) -> ApiError:
    """The error for what the engine refuses in `AdapterReply`, by its ``code``."""
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
