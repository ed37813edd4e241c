"""Log-probabilities in the two shapes of the API.

A token that is not whole UTF-8 appears as ``bytes:\\xNN…``. JSON has no infinity, so impossible
tokens get `FLOOR`.
"""

from __future__ import annotations

from collections.abc import Sequence

from server.openai.shapes import Alternative, ChatLogprobs, ChatToken, CompletionLogprobs
from tp_engine.text import Piece, Tokenizer
from tp_engine.text.token_bytes import printable_token

FLOOR = -9999.0
"""Stands for the logarithm of zero."""


def completion_logprobs(pieces: Sequence[Piece], tokenizer: Tokenizer) -> CompletionLogprobs:
    """The completions shape."""
    tops = []
    for piece in pieces:
        found = piece.logprobs
        top: dict[str, float] = {}
        for token, logprob in zip(found.top_ids, found.top_logprobs, strict=True):
            top.setdefault(_text(tokenizer, token), _finite(logprob))
        top.setdefault(_text(tokenizer, found.token), _finite(found.logprob))
        tops.append(top)
    return CompletionLogprobs(
        tokens=[_text(tokenizer, piece.logprobs.token) for piece in pieces],
        token_logprobs=[_finite(piece.logprobs.logprob) for piece in pieces],
        top_logprobs=tops,
        text_offset=[piece.offset for piece in pieces],
    )


def chat_logprobs(pieces: Sequence[Piece], tokenizer: Tokenizer) -> ChatLogprobs:
    """The chat shape."""
    return ChatLogprobs(content=[_chat_token(piece, tokenizer) for piece in pieces])


def _chat_token(piece: Piece, tokenizer: Tokenizer) -> ChatToken:
    found = piece.logprobs
    sampled = _alternative(tokenizer, found.token, found.logprob)
    top = zip(found.top_ids, found.top_logprobs, strict=True)
    return ChatToken(
        token=sampled.token,
        logprob=sampled.logprob,
        bytes=sampled.bytes,
        top_logprobs=[_alternative(tokenizer, token, logprob) for token, logprob in top],
    )


def _alternative(tokenizer: Tokenizer, token: int, logprob: float) -> Alternative:
    data = tokenizer.token_bytes(token)
    return Alternative(token=printable_token(data), logprob=_finite(logprob), bytes=list(data))


def _text(tokenizer: Tokenizer, token: int) -> str:
    return printable_token(tokenizer.token_bytes(token))


def _finite(logprob: float) -> float:
    return logprob if logprob > FLOOR else FLOOR  # not max(): NaN must become FLOOR too
