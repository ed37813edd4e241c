"""The adapters as a resource.

GET    /admin/adapters                   a page of them: ?after=NAME&limit=N&prefix=P&state=S&base=B
POST   /admin/adapters                   {"name", "source", "replace"?, "sha256"?}: an operation
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

from server.admin import listing
from server.admin.operations import accepted
from server.admin.replies import as_json, carry_out
from server.body import read_body
from server.errors import UnknownModel
from server.services import services_of
from tp_engine.messages import MoveAdapter, UnloadAdapter

router = APIRouter(prefix="/admin/adapters")


class RegisterFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of a registration."""

    name: str
    source: str
    """A directory of the server's host, or an address."""
    replace: bool = False
    """Whether an adapter of this name is replaced; else it is refused."""
    sha256: dict[str, str] = {}
    """That the files must have, in hex, by name."""


class PromoteFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of a promotion."""

    revision: str


_register_decoder = msgspec.json.Decoder(RegisterFields)
_promote_decoder = msgspec.json.Decoder(PromoteFields)


@router.get("")
async def adapters(request: Request) -> Response:
    """List a page of adapters."""
    return as_json(await listing.page(request))


@router.post("")
async def register(request: Request) -> Response:
    """Begin to load an adapter; answers with the operation to watch."""
    fields = await read_body(request, _register_decoder.decode)
    operation = services_of(request).loads.begin(
        fields.name, fields.source, in_place=fields.replace, sums=fields.sha256
    )
    return accepted(operation)


@router.get("/{name:path}")
async def adapter(request: Request, name: str) -> Response:
    """Show one adapter."""
    found = await listing.find(request, name)
    if found is None:
        raise UnknownModel(
            f"adapter {name!r} is not loaded", param="name", code="adapter_not_found"
        )
    return as_json(found)


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
