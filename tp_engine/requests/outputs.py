"""What a turn of the engine says about a request."""

from __future__ import annotations

from tp_engine.messages import Failed, Output, TokenLogprobs
from tp_engine.scheduler import Request


def token_output(
    request: Request, token: int, logprobs: TokenLogprobs | None, reason: str | None
) -> Output:
    """A token of a request, which ends for ``reason`` if there is one. The token that makes it
    ``stop`` is not part of its output."""
    stopped = reason == "stop"
    return Output(
        request_id=request.id,
        tokens=[] if stopped else [token],
        logprobs=None if logprobs is None else [] if stopped else [logprobs],
        finish_reason=reason,
        stop_token=token if stopped else None,
        cached_tokens=request.cached_tokens,
        completion_tokens=request.output_len,
    )


def not_finite(request: Request) -> Failed:
    """No token could be chosen."""
    return Failed(
        request_id=request.id,
        code="numerical_error",
        message=f"the model's output for {request.model} is not finite",
    )


def not_brought(request: Request, error: Exception) -> Failed:
    """Its adapter could not be brought up."""
    return Failed(
        request_id=request.id,
        code="adapter_unavailable",
        message=f"the adapter of {request.model} cannot be brought up: {error}",
    )


__all__ = ["not_brought", "not_finite", "token_output"]
