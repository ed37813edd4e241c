"""What is done to an adapter while it stays the same.

POST /admin/adapters/NAME/pin       keep it in memory
POST /admin/adapters/NAME/unpin
POST /admin/adapters/NAME/preload   {"tier"?}: bring it up before anybody asks for it
POST /admin/adapters/NAME/drain     {"seconds"?, "remove"?}: give it no new requests
POST /admin/adapters/NAME/resume    give it requests again
POST /admin/adapters/NAME/flush     write what was pushed to the store
POST /admin/flush                   likewise, of all adapters
"""

from __future__ import annotations

import asyncio
import uuid
from typing import Literal

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from server.admin.operations import Operation, accepted
from server.admin.replies import Done, as_json, carry_out, done, refusal
from server.body import read_body
from server.errors import ApiError, InvalidRequest
from server.services import services_of
from tp_engine.messages import (
    AdapterReply,
    AdaptersFlushed,
    DrainAdapter,
    FlushAdapters,
    PinAdapter,
    PreloadAdapter,
    ResumeAdapter,
)

router = APIRouter(prefix="/admin")

MAX_DRAIN_SECONDS = 24 * 3600.0
PRELOAD_SECONDS = 1.0
"""Until a preload is answered with an operation to watch."""


class DrainFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of a drain."""

    seconds: float = 60.0
    """That open requests may still take before they are ended."""
    remove: bool = False
    """Whether the adapter goes when they have ended."""


class PreloadFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of a preload."""

    tier: Literal["arena", "host"] = "arena"
    """How far up."""


class Flushed(msgspec.Struct, frozen=True, kw_only=True):
    """What was written to the store."""

    written: list[str]
    """Names whose meaning it has now and had not."""


_preload_decoder = msgspec.json.Decoder(PreloadFields)
_drain_decoder = msgspec.json.Decoder(DrainFields)


@router.post("/adapters/{name:path}/pin")
async def pin(request: Request, name: str) -> Response:
    """Keep an adapter in the hosts' memory, and in the arena as long as it has room."""
    call = PinAdapter(call_id=uuid.uuid4().hex, name=name, pinned=True)
    return await carry_out(request, call, "pinned")


@router.post("/adapters/{name:path}/unpin")
async def unpin(request: Request, name: str) -> Response:
    """Let an idle adapter leave the memory again."""
    call = PinAdapter(call_id=uuid.uuid4().hex, name=name, pinned=False)
    return await carry_out(request, call, "unpinned")


@router.post("/adapters/{name:path}/preload")
async def preload(request: Request, name: str) -> Response:
    """Bring an adapter up; answers when it is there, or soon with an operation to watch."""
    services = services_of(request)
    services.client.require_serving()
    tier = (await read_body(request, lambda body: _preload_decoder.decode(body or b"{}"))).tier
    call = PreloadAdapter(call_id=uuid.uuid4().hex, name=name, arena=tier == "arena")

    async def work(_: Operation) -> Done:
        reply = await services.client.call(call)
        assert isinstance(reply, AdapterReply)
        return done(reply, name, "preloaded")

    operation = services.loads.operations.begin(name, f"preload to {tier}", "preloading", work)
    try:
        async with asyncio.timeout(PRELOAD_SECONDS):
            return as_json(await operation.finished())
    except TimeoutError:
        return accepted(operation)


@router.post("/adapters/{name:path}/drain")
async def drain(request: Request, name: str) -> Response:
    """Give an adapter no new requests; answers at once, with how many are still open."""
    fields = await read_body(request, lambda body: _drain_decoder.decode(body or b"{}"))
    if not 0 <= fields.seconds <= MAX_DRAIN_SECONDS:
        raise InvalidRequest(
            f"seconds={fields.seconds} must be from 0 to {MAX_DRAIN_SECONDS:g}", param="seconds"
        )
    call = DrainAdapter(
        call_id=uuid.uuid4().hex, name=name, seconds=fields.seconds, remove=fields.remove
    )
    return await carry_out(request, call, "drained")


@router.post("/adapters/{name:path}/resume")
async def resume(request: Request, name: str) -> Response:
    """Give a drained adapter requests again."""
    return await carry_out(request, ResumeAdapter(call_id=uuid.uuid4().hex, name=name), "resumed")


@router.post("/adapters/{name:path}/flush")
async def flush(request: Request, name: str) -> Response:
    """Write what an adapter's name means to the store, if that does not know it."""
    return await _flush(request, name)


@router.post("/flush")
async def flush_all(request: Request) -> Response:
    """Write everything that was pushed to the store."""
    return await _flush(request, None)


async def _flush(request: Request, name: str | None) -> Response:
    call = FlushAdapters(call_id=uuid.uuid4().hex, name=name)
    answer = await services_of(request).client.call(call)
    if isinstance(answer, AdapterReply):
        raise refusal(answer.code or "", answer.message)
    assert isinstance(answer, AdaptersFlushed)
    if answer.failed:
        text = "; ".join(f"{name!r}: {reason}" for name, reason in answer.failed.items())
        raise ApiError(f"not written to the store: {text}", code="store_failed")
    return as_json(Flushed(written=answer.written))
