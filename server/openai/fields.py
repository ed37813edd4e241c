"""Request bodies, as strictly typed as the API documents them.

Every field may be null, which means its default. Fields that are not listed here are ignored
unless `server.openai.refused` names them.
"""

from __future__ import annotations

from typing import Any

import msgspec


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """``stream_options``."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """Whether each chunk has the counts so far, once `include_usage` asks for counts."""


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True):
    """What completions and chat completions have in common."""

    model: str
    n: int | None = None
    best_of: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    cache_salt: str | None = None
    wait_for_adapter: bool | None = None


class CompletionFields(SamplingFields, frozen=True, kw_only=True):
    """Body of ``POST /v1/completions``."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None


class ContentPart(msgspec.Struct, frozen=True, kw_only=True):
    """One part of a message's content; only text is served."""

    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of ``messages``."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[Any] | None = None
    function_call: Any = None


class ChatFields(SamplingFields, frozen=True, kw_only=True):
    """Body of ``POST /v1/chat/completions``."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    echo: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
