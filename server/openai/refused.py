"""Fields that other servers know, that would change the output, and that this one cannot honour.

Such a field is refused by name unless its value asks for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from server.errors import InvalidRequest

_EMPTY: tuple[Any, ...] = (None, False, "", [], {})

REFUSED: Mapping[str, tuple[Any, ...]] = {
    "allowed_token_ids": _EMPTY,
    "audio": _EMPTY,
    "bad_words": _EMPTY,
    "chat_template": _EMPTY,
    "documents": _EMPTY,
    "function_call": (*_EMPTY, "none", "auto"),
    "functions": _EMPTY,
    "guided_choice": _EMPTY,
    "guided_decoding_backend": _EMPTY,
    "guided_grammar": _EMPTY,
    "guided_json": _EMPTY,
    "guided_regex": _EMPTY,
    "include_stop_str_in_output": _EMPTY,
    "length_penalty": (*_EMPTY, 1),
    "logits_processors": _EMPTY,
    "modalities": (*_EMPTY, ["text"]),
    "prompt_embeds": _EMPTY,
    "prompt_logprobs": (None, False),
    "reasoning_effort": (None,),
    "response_format": (*_EMPTY, {"type": "text"}),
    "return_token_ids": _EMPTY,
    "return_tokens_as_token_ids": _EMPTY,
    "spaces_between_special_tokens": (None, True),
    "structured_outputs": _EMPTY,
    "suffix": _EMPTY,
    "tool_choice": (*_EMPTY, "none", "auto"),
    "tools": _EMPTY,
    "truncate_prompt_tokens": _EMPTY,
    "use_beam_search": _EMPTY,
    "verbosity": (None,),
    "web_search_options": (None,),
}
"""Field name to the values that ask for nothing."""


def check_refused(fields: Mapping[str, msgspec.Raw]) -> None:
    """Raise `InvalidRequest` when a body's top-level ``fields`` ask for what is not served."""
    for name in fields.keys() & REFUSED.keys():
        value = msgspec.json.decode(fields[name])
        if not any(type(value) is type(ok) and value == ok for ok in _numbers(REFUSED[name])):
            raise InvalidRequest(f"{name} is not supported", param=name, code="unsupported")


def _numbers(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """``values``, with integers also as the floats that JSON may spell them as."""
    return (*values, *(float(value) for value in values if type(value) is int))
