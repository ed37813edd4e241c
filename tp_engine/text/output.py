"""The text of one output: detokenised, cut at stop strings, with the place of each token in it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec

from tp_engine.messages import TokenLogprobs
from tp_engine.text.detokenizer import Detokenizer
from tp_engine.text.stop import StopMatcher
from tp_engine.text.tokenizer import Tokenizer


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """One token whose text has been released."""

    logprobs: TokenLogprobs
    offset: int
    """Characters of the output before it; a token inside a character has that character's."""


class TextDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What one step adds to an output."""

    text: str
    pieces: tuple[Piece, ...]
    """Only when log-probabilities were given."""


class OutputText:
    """Collects the tokens of one output and releases text in order.

    Stop strings are looked for in the text that follows the first ``min_tokens`` tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stops: Sequence[str] = (),
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
        continues: bool = False,
    ) -> None:
        """See `Detokenizer` for ``skip_special_tokens`` and ``continues``."""
        self._detokenizer = Detokenizer(
            tokenizer, skip_special_tokens=skip_special_tokens, continues=continues
        )
        self._stop = StopMatcher(stops)
        self._min_tokens = min_tokens
        self._pieces: deque[Piece] = deque()
        self._released = 0
        self.tokens = 0
        """Tokens taken in; those after a stop string's last one are not."""

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the output, if one did."""
        return self._stop.matched

    def push(
        self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs] | None = None
    ) -> TextDelta:
        """Add tokens; stops at the token that completes a stop string."""
        released = []
        for index, token in enumerate(tokens):
            if self.stopped_by is not None:
                break
            self.tokens += 1
            if logprobs is not None:
                offset = self._detokenizer.length
                self._pieces.append(Piece(logprobs=logprobs[index], offset=offset))
            released.append(self._pass(self._detokenizer.push(token)))
        return self._release("".join(released))

    def flush(self) -> TextDelta:
        """Return what is held back; no token follows."""
        text = self._pass(self._detokenizer.flush()) + self._stop.flush()
        delta = self._release(text)
        if self.stopped_by is not None:
            return delta
        rest = tuple(self._pieces)
        self._pieces.clear()
        return TextDelta(text=delta.text, pieces=delta.pieces + rest)

    def _pass(self, text: str) -> str:
        return text if self.tokens <= self._min_tokens else self._stop.push(text)

    def _release(self, text: str) -> TextDelta:
        self._released += len(text)
        pieces = []
        while self._pieces and self._pieces[0].offset < self._released:
            pieces.append(self._pieces.popleft())
        return TextDelta(text=text, pieces=tuple(pieces))
