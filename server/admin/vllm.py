"""Bodies as clients of vLLM send them.

POST /v1/load_lora_adapter     {"lora_name", "lora_path", "load_inplace"?}
POST /v1/unload_lora_adapter   {"lora_name"}
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from server.admin.replies import as_json, carry_out
from server.body import read_body
from server.errors import ApiError
from server.services import services_of
from tp_engine.messages import LoadAdapter, UnloadAdapter

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


_OWN_NAMES = {"name": "lora_name", "source": "lora_path"}
_load_decoder = msgspec.json.Decoder(LoadFields)
_unload_decoder = msgspec.json.Decoder(UnloadFields)


@router.post("/v1/load_lora_adapter")
async def load(request: Request) -> Response:
    """Load an adapter; answers when requests may use it, also if it must be fetched first."""
    fields = await read_body(request, _load_decoder.decode)
    loads = services_of(request).loads
    with _own_names():
        if loads.is_remote(fields.lora_path):
            operation = loads.begin(
                fields.lora_name, fields.lora_path, in_place=fields.load_inplace, sums={}
            )
            return as_json(await operation.finished())
        call = LoadAdapter(
            call_id=uuid.uuid4().hex,
            name=fields.lora_name,
            path=fields.lora_path,
            in_place=fields.load_inplace,
        )
        return await carry_out(request, call, "added")


@router.post("/v1/unload_lora_adapter")
async def unload(request: Request) -> Response:
    """Unload an adapter; requests that run go on, new ones get 404."""
    fields = await read_body(request, _unload_decoder.decode)
    call = UnloadAdapter(call_id=uuid.uuid4().hex, name=fields.lora_name)
    with _own_names():
        return await carry_out(request, call, "removed")


@contextmanager
def _own_names() -> Iterator[None]:
    """Name fields in errors as these bodies name them."""
    try:
        yield
    except ApiError as error:
        error.param = _OWN_NAMES.get(error.param or "", error.param)
        raise
