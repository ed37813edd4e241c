"""The answer to one prompt of offline use, and the prompt while it runs."""

from __future__ import annotations

from dataclasses import dataclass

from tp_engine.messages import Output, Submit, TokenLogprobs
from tp_engine.text import OutputText, Tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """The answer to one prompt."""

    model: str
    prompt_tokens: list[int]
    tokens: list[int]
    """Without the end-of-sequence or stop token."""
    text: str
    finish_reason: str
    """``stop`` or ``length``."""
    logprobs: list[TokenLogprobs] | None
    cached_tokens: int
    """Prompt tokens taken from the prefix cache."""


class OpenPrompt:
    """One prompt of a `generate` call while it runs."""

    def __init__(
        self, message: Submit, tokenizer: Tokenizer | None, *, continues: bool = False
    ) -> None:
        """``continues``: whether the text goes on from the prompt's, so that a space counts."""
        self.message = message
        params = message.params
        if params.stop and tokenizer is None:
            raise ValueError("stop strings need a tokenizer, and the model's directory has none")
        self._text = (
            OutputText(
                tokenizer, stops=params.stop, min_tokens=params.min_tokens, continues=continues
            )
            if tokenizer is not None
            else None
        )
        self._parts: list[str] = []
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._reason = ""
        self._cached = 0

    def take(self, output: Output) -> bool:
        """Add what a step gave; True when a stop string ends the output here."""
        self._tokens += output.tokens
        self._logprobs += output.logprobs or []
        self._reason = output.finish_reason or ""
        self._cached = output.cached_tokens
        if self._text is not None:
            self._parts.append(self._text.push(output.tokens).text)
            if self._text.stopped_by is not None:
                self._reason = "stop"
                return True
            if self._reason:
                self._parts.append(self._text.flush().text)
        return False

    def completion(self) -> Completion:
        """The whole, once it has ended."""
        return Completion(
            model=self.message.model,
            prompt_tokens=self.message.prompt,
            tokens=self._tokens,
            text="".join(self._parts),
            finish_reason=self._reason,
            logprobs=self._logprobs if self.message.params.logprobs is not None else None,
            cached_tokens=self._cached,
        )
