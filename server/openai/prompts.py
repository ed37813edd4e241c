"""From prompts and messages to token ids that fit the context."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, cast

from server.errors import InvalidRequest
from server.openai.fields import ChatFields, ChatMessage, CompletionFields
from tp_engine.messages import Ready
from tp_engine.text import ChatTemplateError, Tokenizer

MAX_PROMPTS = 1024
"""Most prompts a request."""

LONG_TEXT: Final = 1 << 16
"""Characters of a text that takes long to tokenise."""
_long_texts: Final = ThreadPoolExecutor(2, "long-text")
"""So that however many of them come, short ones find a thread."""

Prompt = str | list[int]


def split_prompts(prompt: str | list[str | int | list[int]]) -> list[Prompt]:
    """The prompts of a completions request: a string, ids, or a list of either.

    Raises:
        InvalidRequest: empty, mixed, or too many.
    """
    if isinstance(prompt, str):
        return [prompt]
    prompts: list[Prompt]
    kinds = set(map(type, prompt))
    if kinds == {int}:
        prompts = [cast(list[int], prompt)]
    elif kinds in ({str}, {list}):
        prompts = cast(list[Prompt], prompt)
    else:
        raise InvalidRequest(
            "prompt must be a string, a list of strings, token ids, or a list of those",
            param="prompt",
        )
    if len(prompts) > MAX_PROMPTS:
        raise InvalidRequest(f"prompt: at most {MAX_PROMPTS} prompts a request", param="prompt")
    return prompts


async def completion_ids(
    fields: CompletionFields, tokenizer: Tokenizer, ready: Ready
) -> list[list[int]]:
    """Token ids of every prompt, each at least one.

    Raises:
        InvalidRequest: an id is not in the vocabulary, or a prompt is empty.
    """
    special = fields.add_special_tokens is not False
    result = []
    for prompt in split_prompts(fields.prompt):
        if isinstance(prompt, str):
            _check_length(len(prompt), tokenizer, ready, "prompt")
            work = partial(tokenizer.encode, prompt, add_special_tokens=special)
            ids = await _in_thread(work, len(prompt))
        else:
            ids = prompt
        _check_ids(ids, ready.vocab_size, "prompt")
        result.append(ids)
    return result


async def chat_ids(fields: ChatFields, tokenizer: Tokenizer, ready: Ready) -> list[int]:
    """Token ids of the messages in the model's chat template.

    Raises:
        InvalidRequest: a message is not plain text, or the template refuses the messages.
    """
    if not fields.messages:
        raise InvalidRequest("messages must not be empty", param="messages")
    if len(fields.messages) > ready.max_model_len:
        text = f"{len(fields.messages)} messages do not fit into {ready.max_model_len} tokens"
        raise InvalidRequest(text, param="messages", code="context_length_exceeded")
    messages = [_plain(message, index) for index, message in enumerate(fields.messages)]
    characters = sum(len(message["content"]) for message in messages)
    _check_length(characters, tokenizer, ready, "messages")
    carry_on = fields.continue_final_message or False
    prompted = fields.add_generation_prompt
    if carry_on and prompted:
        raise InvalidRequest(
            "continue_final_message excludes add_generation_prompt",
            param="continue_final_message",
        )
    work = partial(
        tokenizer.encode_chat,
        messages,
        add_generation_prompt=not carry_on if prompted is None else prompted,
        continue_final_message=carry_on,
        add_special_tokens=fields.add_special_tokens or False,
        template_arguments=fields.chat_template_kwargs,
    )
    try:
        ids = await _in_thread(work, characters)
    except ChatTemplateError as error:
        raise InvalidRequest(str(error), param=error.param, code="chat_template") from error
    _check_ids(ids, ready.vocab_size, "messages")
    return ids


def output_limit(
    prompts: Sequence[list[int]],
    wanted: int | None,
    ready: Ready,
    *,
    default: int | None,
    name: str,
) -> int:
    """Most tokens to generate: ``wanted``, or ``default`` as far as the context has room.

    Args:
        wanted: the request's own limit.
        default: used when there is none; None stands for all the room there is.
        name: the field that ``wanted`` came from.

    Raises:
        InvalidRequest: ``wanted`` is below 1, or a prompt leaves too little room.
    """
    if wanted is not None and wanted < 1:
        raise InvalidRequest(f"{name}={wanted} is not allowed: at least 1", param=name)
    longest = max(len(ids) for ids in prompts)
    room = ready.max_model_len - longest
    if room < (wanted or 1):
        raise InvalidRequest(
            f"the context holds {ready.max_model_len} tokens; the prompt has {longest} and "
            f"{name} asks for {wanted or 'at least 1'} more",
            param=name if wanted is not None and room > 0 else None,
            code="context_length_exceeded",
        )
    return wanted or min(room, default or room)


def _check_length(characters: int, tokenizer: Tokenizer, ready: Ready, param: str) -> None:
    """Refuse what cannot fit before the long work of tokenising it."""
    if characters > ready.max_model_len * tokenizer.longest:
        raise InvalidRequest(
            f"{param} has {characters} characters; the context holds {ready.max_model_len} tokens, "
            f"each of at most {tokenizer.longest} characters",
            param=param,
            code="context_length_exceeded",
        )


async def _in_thread(work: Callable[[], list[int]], characters: int) -> list[int]:
    """Do ``work`` on so much text; if the caller is cancelled before it begins, it never does."""
    threads = _long_texts if characters > LONG_TEXT else None
    return await asyncio.get_running_loop().run_in_executor(threads, work)


def _check_ids(ids: list[int], vocab_size: int, param: str) -> None:
    if not ids:
        raise InvalidRequest(f"{param} has no tokens", param=param)
    if not (min(ids) >= 0 and max(ids) < vocab_size):
        bad = next(token for token in ids if not 0 <= token < vocab_size)
        raise InvalidRequest(
            f"{param}: token id {bad} is not allowed: from 0 to {vocab_size - 1}", param=param
        )


def _plain(message: ChatMessage, index: int) -> dict[str, Any]:
    where = f"messages[{index}]"
    if message.tool_calls or message.function_call or message.role in ("tool", "function"):
        raise InvalidRequest(f"{where}: tool calls are not supported", param="messages")
    if message.content is None:
        raise InvalidRequest(f"{where}.content is missing", param="messages")
    content = message.content
    if not isinstance(content, str):
        for part in content:
            if part.type != "text":
                raise InvalidRequest(
                    f"{where}.content: part type {part.type!r} is not supported: only 'text'",
                    param="messages",
                )
            if part.text is None:
                text = f"{where}.content: a part of type 'text' has no text"
                raise InvalidRequest(text, param="messages")
        content = "\n".join(part.text or "" for part in content)
    # Templates know the older of the two names.
    role = "system" if message.role == "developer" else message.role
    plain = {"role": role, "content": content}
    return plain if message.name is None else plain | {"name": message.name}
