"""Sampling parameters of one request, checked once when they are made."""

from __future__ import annotations

import math
from typing import Any

import msgspec

MAX_LOGPROBS = 64
"""Most alternatives per token that a request may ask for."""
MAX_STOP_STRINGS = 16
"""Most stop strings per request."""
MAX_STOP_LENGTH = 1024
"""Longest stop string, in characters."""
MAX_STOP_TOKENS = 1024
"""Most stop tokens per request: every token of its output is looked for among them."""
MAX_LOGIT_BIAS = 1024
"""Most entries of a request's logit bias."""


class ParameterError(ValueError):
    """A request field has a value outside what is allowed; ``param`` is the field's name."""

    def __init__(self, param: str, value: object, allowed: str) -> None:
        shown = repr(value)
        if len(shown) > 80:
            shown = shown[:77] + "..."
        super().__init__(f"{param}={shown} is not allowed: {allowed}")
        self.param = param


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to choose the tokens of one request.

    The order of operations on a row of logits is: logit bias; repetition, presence and frequency
    penalties; temperature; top-k; top-p over what top-k left, renormalised; min-p relative to the
    best remaining probability. Log-probabilities are those of the model's own logits, before
    all of these. ``temperature == 0`` picks the best logit (the lowest id among equals).

    Raises:
        ParameterError: a value is outside its range; the message names field, value and range.
    """

    max_tokens: int | None = 16
    """Most tokens to generate; None fills the context."""
    temperature: float = 1.0
    """0 is greedy; at most 100."""
    top_k: int = -1
    """Keep the k best tokens; -1 or 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of best tokens whose probability reaches this; in (0, 1]."""
    min_p: float = 0.0
    """Keep tokens with at least this share of the best token's probability; in [0, 1]."""
    seed: int | None = None
    """Fixes the random numbers: they depend on the seed and the token's position alone."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens seen in prompt or output."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token seen in the output."""
    frequency_penalty: float = 0.0
    """Subtracted once per occurrence in the output."""
    logit_bias: dict[int, float] = msgspec.field(default_factory=dict)
    """Added to the logits of these token ids; each in [-100, 100]."""
    stop: tuple[str, ...] = ()
    """Strings that end the output; they are not part of it."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the output."""
    ignore_eos: bool = False
    """Go on past the model's end-of-sequence tokens."""
    min_tokens: int = 0
    """End-of-sequence and stop tokens are not sampled before this many tokens."""
    logprobs: int | None = None
    """Alternatives per token to report with log-probabilities; 0 reports the sampled token only."""

    def __post_init__(self) -> None:
        _number(self, "temperature", 0.0, 100.0)
        _number(self, "top_p", 0.0, 1.0, low_open=True)
        _number(self, "min_p", 0.0, 1.0)
        _number(self, "repetition_penalty", 0.0, 100.0, low_open=True)
        _number(self, "presence_penalty", -2.0, 2.0)
        _number(self, "frequency_penalty", -2.0, 2.0)
        _integer(self, "top_k", -1, 2**31 - 1)
        _integer(self, "min_tokens", 0, 2**31 - 1)
        if self.max_tokens is not None:
            _integer(self, "max_tokens", 1, 2**31 - 1)
        if self.seed is not None:
            _integer(self, "seed", -(2**63), 2**63 - 1)
        if self.logprobs is not None:
            _integer(self, "logprobs", 0, MAX_LOGPROBS)
        if isinstance(self.stop, str):  # each of its characters would be taken for a stop string
            raise ParameterError("stop", self.stop, "a tuple of strings")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise ParameterError("stop", len(self.stop), f"at most {MAX_STOP_STRINGS} strings")
        for text in self.stop:
            if not 1 <= len(text) <= MAX_STOP_LENGTH:
                raise ParameterError("stop", text, f"strings of 1 to {MAX_STOP_LENGTH} characters")
        if len(self.stop_token_ids) > MAX_STOP_TOKENS:
            raise ParameterError(
                "stop_token_ids", len(self.stop_token_ids), f"at most {MAX_STOP_TOKENS} entries"
            )
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise ParameterError(
                "logit_bias", len(self.logit_bias), f"at most {MAX_LOGIT_BIAS} entries"
            )
        for bias in self.logit_bias.values():
            if not (math.isfinite(bias) and -100.0 <= bias <= 100.0):
                raise ParameterError("logit_bias", bias, "values from -100 to 100")

    def check_vocabulary(self, vocab_size: int) -> None:
        """Check every token id against the model.

        Raises:
            ParameterError: an id is negative or not below ``vocab_size``.
        """
        for name, ids in (("stop_token_ids", self.stop_token_ids), ("logit_bias", self.logit_bias)):
            for token in ids:
                if not 0 <= token < vocab_size:
                    raise ParameterError(name, token, f"token ids from 0 to {vocab_size - 1}")

    @property
    def greedy(self) -> bool:
        """Whether the best logit is taken without drawing."""
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        """Whether token counts of prompt or output change the logits."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)


def _number(
    params: SamplingParams, name: str, low: float, high: float, *, low_open: bool = False
) -> None:
    value: Any = getattr(params, name)
    good = isinstance(value, (int, float)) and math.isfinite(value) and low <= value <= high
    if not good or (low_open and value == low):
        raise ParameterError(name, value, f"{'above' if low_open else 'from'} {low:g} to {high:g}")


def _integer(params: SamplingParams, name: str, low: int, high: int) -> None:
    value: Any = getattr(params, name)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ParameterError(name, value, f"an integer from {low} to {high}")
