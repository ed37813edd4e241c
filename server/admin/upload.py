"""Adapters as the body of a request: multipart/form-data with the two files, straight to the disk.

POST /admin/adapters/NAME/upload[?replace=true]
"""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Final

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.admin.operations import accepted
from server.admin.parts import Parts
from server.admin.remote import in_thread
from server.errors import InvalidRequest, Unavailable
from server.services import services_of
from tp_engine.sources import Claim

router = APIRouter(prefix="/admin/adapters")

MAX_UPLOADS: Final = 8
"""Received at a time."""
GATHER_BYTES: Final = 1 << 20
"""Received between two writes to the disk."""

_receiving = asyncio.Semaphore(MAX_UPLOADS)


@router.post("/{name:path}/upload")
async def upload(request: Request, name: str) -> Response:
    """Receive an adapter and begin to load it; answers with the operation to watch."""
    loads = services_of(request).loads
    replace = request.query_params.get("replace", "false")
    if replace not in ("true", "false"):
        raise InvalidRequest(f"replace={replace!r} must be true or false", param="replace")
    in_place = replace == "true"
    name = loads.free_name(name, in_place=in_place)
    claim = await receive(request)
    try:
        operation = loads.begin_uploaded(name, claim, in_place=in_place)
    except BaseException:
        await _drop(claim)
        raise
    return accepted(operation)


async def receive(request: Request) -> Claim:
    """The files of a request's body, for the caller to give up.

    Raises:
        ApiError: there is no place for them, or they are not as they must be.
    """
    remote = services_of(request).loads.remote
    if remote is None:
        text = "uploads need a place: start the server with --adapter-store"
        raise InvalidRequest(text, code="no_store")
    if _receiving.locked():
        raise Unavailable(f"{MAX_UPLOADS} uploads are received; that is the limit")
    async with _receiving:
        claim = remote.area.new_claim()
        try:
            await _receive(request, claim.path)
        except BaseException:
            await _drop(claim)
            raise
    return claim


async def _drop(claim: Claim) -> None:
    """Delete what was received, in a thread: a long file takes long."""
    await in_thread(partial(claim.release, keep=False))


async def _receive(request: Request, directory: Path) -> None:
    """Write the files of a request's body into a directory."""
    length = request.headers.get("content-length", "")
    parts = Parts(directory, request.headers.get("content-type", ""), _number(length))
    try:
        gathered = bytearray()
        async for chunk in request.stream():
            gathered += chunk
            if len(gathered) >= GATHER_BYTES:
                await in_thread(partial(parts.feed, bytes(gathered)))
                gathered.clear()
        await in_thread(partial(parts.feed, bytes(gathered)))
        parts.finish()
    finally:
        parts.close()


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() else None
