"""From the bytes of a request body to the data plane's fields."""

from __future__ import annotations

from typing import TypeVar

import msgspec
from fastapi import Request

from server.body import read_body
from server.errors import InvalidRequest
from server.openai.fields import SamplingFields
from server.openai.refused import check_refused

F = TypeVar("F", bound=SamplingFields)

MAX_NAME = 1024
"""Longest model name and cache salt, in characters."""

_top_level = msgspec.json.Decoder(dict[str, msgspec.Raw])


async def read_fields(request: Request, decoder: msgspec.json.Decoder[F]) -> F:
    """The request's fields.

    Raises:
        InvalidRequest: as `server.body.read_body`, or a field is one that this server refuses.
    """

    def decode(body: bytes) -> F:
        check_refused(_top_level.decode(body))
        return decoder.decode(body)

    fields = await read_body(request, decode)
    for name in ("model", "cache_salt"):
        if len(getattr(fields, name) or "") > MAX_NAME:
            raise InvalidRequest(f"{name} is longer than {MAX_NAME} characters", param=name)
    return fields
