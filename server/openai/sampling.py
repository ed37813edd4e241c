"""From request fields to checked sampling parameters."""

from __future__ import annotations

from typing import Any

from server.errors import InvalidRequest
from server.openai.fields import SamplingFields
from tp_engine.messages import Ready
from tp_engine.params import ParameterError, SamplingParams

MAX_N = 128
"""Most outputs a prompt."""

_COPIED = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "ignore_eos",
    "min_tokens",
)
_SEEDS = 2**64


def outputs_per_prompt(fields: SamplingFields) -> int:
    """``n``. Raises `InvalidRequest` when it is out of range or ``best_of`` differs from it."""
    n = 1 if fields.n is None else fields.n
    if not 1 <= n <= MAX_N:
        raise InvalidRequest(f"n={n} is not allowed: an integer from 1 to {MAX_N}", param="n")
    if fields.best_of not in (None, n):
        raise InvalidRequest(
            f"best_of={fields.best_of} is not supported: it must equal n={n}", param="best_of"
        )
    return n


def sampling_params(
    fields: SamplingFields, ready: Ready, *, max_tokens: int, logprobs: int | None
) -> SamplingParams:
    """The parameters of every output of a request, before seeds are told apart.

    Raises:
        InvalidRequest: a value is out of range; ``param`` names the field.
    """
    given: dict[str, Any] = {
        name: value for name in _COPIED if (value := getattr(fields, name)) is not None
    }
    try:
        params = SamplingParams(
            max_tokens=max_tokens,
            logprobs=logprobs,
            logit_bias=_logit_bias(fields.logit_bias or {}),
            stop=_stop(fields.stop),
            stop_token_ids=tuple(fields.stop_token_ids or ()),
            **given,
        )
        params.check_vocabulary(ready.vocab_size)
    except ParameterError as error:
        raise InvalidRequest(str(error), param=error.param) from error
    if params.min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens={params.min_tokens} is not allowed: at most max_tokens={max_tokens}",
            param="min_tokens",
        )
    return params


def seed_of_output(seed: int | None, index: int) -> int | None:
    """The seed of a prompt's output ``index``: ``seed + index``, wrapped to 64 bits."""
    if seed is None:
        return None
    return (seed + index + _SEEDS // 2) % _SEEDS - _SEEDS // 2


def _stop(stop: str | list[str] | None) -> tuple[str, ...]:
    return (stop,) if isinstance(stop, str) else tuple(stop or ())


def _logit_bias(bias: dict[str, float]) -> dict[int, float]:
    result = {}
    for key, value in bias.items():
        digits = key.removeprefix("-")
        if not (digits.isascii() and digits.isdigit() and len(digits) <= 18):
            raise ParameterError("logit_bias", key, "token ids as keys")
        result[int(key)] = value
    return result
