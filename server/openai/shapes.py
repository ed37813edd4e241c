"""Response bodies, as the OpenAI API documents them.

``system_fingerprint`` is the SHA-256 of the adapter revision that answers, or of the base.
``stop_reason`` (the stop string or token id that the request gave and that ended an output, null at
the model's own end) is an addition that other open servers make too.
"""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType


class CachedTokens(msgspec.Struct, frozen=True, kw_only=True):
    """``prompt_tokens_details``."""

    cached_tokens: int


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts; a prompt counts once however many outputs it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class CompletionLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probabilities of completions: parallel lists, one entry a token."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    """The best tokens, and the sampled one when it is not among them."""
    text_offset: list[int]
    """Characters of the choice's whole text before the token."""


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One output, or one piece of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of ``/v1/completions``, and each chunk of its stream."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class Alternative(msgspec.Struct, frozen=True, kw_only=True):
    """A token that was likely at some position."""

    token: str
    logprob: float
    bytes: list[int]


class ChatToken(msgspec.Struct, frozen=True, kw_only=True):
    """The sampled token at some position."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[Alternative]


class ChatLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probabilities of chat completions: one object a token."""

    content: list[ChatToken]


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The assistant's message, or what a chunk adds to it."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One output: ``message`` when whole, ``delta`` in a stream."""

    index: int
    message: ChatMessage | UnsetType = UNSET
    delta: ChatMessage | UnsetType = UNSET
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class Chat(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of ``/v1/chat/completions``, and each chunk of its stream."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[ChatChoice]
    usage: Usage | UnsetType | None = UNSET


class ModelObject(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of ``/v1/models``."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "tp_engine"
    root: str
    parent: str | None
    max_model_len: int
    revision: str | None


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of ``/v1/models``."""

    object: str = "list"
    data: list[ModelObject]
