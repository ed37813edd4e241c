"""From the bytes of a request body to typed fields."""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec
from fastapi import Request

from server.errors import InvalidRequest
from server.openai.fields import SamplingFields
from server.openai.refused import check_refused

F = TypeVar("F", bound=SamplingFields)

MAX_NAME = 1024
"""Longest model name and cache salt, in characters."""

_PATH = re.compile(r"`\$\.(\w+)")
_MISSING = re.compile(r"field `(\w+)`")
_top_level = msgspec.json.Decoder(dict[str, msgspec.Raw])


async def read_fields(request: Request, decoder: msgspec.json.Decoder[F]) -> F:
    """The request's fields.

    Raises:
        InvalidRequest: the body is not UTF-8 JSON (NaN, infinities and lone surrogates are not),
            not an object, a field is missing, mistyped, or one that this server refuses.
    """
    body = await request.body()
    try:
        check_refused(_top_level.decode(body))
        fields = decoder.decode(body)
    except msgspec.ValidationError as error:
        found = _PATH.search(str(error)) or _MISSING.search(str(error))
        raise InvalidRequest(str(error), param=found[1] if found else None) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error
    for name in ("model", "cache_salt"):
        if len(getattr(fields, name) or "") > MAX_NAME:
            raise InvalidRequest(f"{name} is longer than {MAX_NAME} characters", param=name)
    return fields
