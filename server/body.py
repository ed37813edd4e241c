"""From the bytes of a request body to typed values."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from typing import TypeVar

import msgspec
from fastapi import Request

from server.errors import InvalidRequest

T = TypeVar("T")

_PATH = re.compile(r"`\$\.(\w+)")
_MISSING = re.compile(r"field `(\w+)`")


async def read_body(request: Request, decode: Callable[[bytes], T]) -> T:
    """What ``decode``, a msgspec decoder's method or one over it, makes of the body.

    Raises:
        InvalidRequest: the body is not UTF-8 JSON (NaN, infinities and lone surrogates are not),
            not an object, or a field is missing or mistyped.
    """
    # Not `Request.body`, which would keep it for as long as the answer takes.
    body = b"".join([part async for part in request.stream()])
    collects = gc.isenabled()
    gc.disable()  # a long body's values would be gone through again and again while they are made
    try:
        return decode(body)
    except msgspec.ValidationError as error:
        found = _PATH.search(str(error)) or _MISSING.search(str(error))
        raise InvalidRequest(str(error), param=found[1] if found else None) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error
    finally:
        if collects:
            gc.enable()
