"""Incremental detokenisation of one output.

    ids      ... t  t  t  t  t  t            window: decoded again for every new token
                    |--- window ---|
    text            |== sent ==|held|        held: trailing U+FFFD, may become a character

The window starts where a character starts, and is cut short whenever all of its text was sent,
so that the work per token does not grow with the output.
"""

from __future__ import annotations

from tp_engine.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_LONGEST_TAIL = 3
"""An unfinished UTF-8 character has at most this many bytes, hence tokens."""
_WINDOW = 8
"""A longer window is cut where all is sent; where nothing ever is, this many tokens are kept."""


class Detokenizer:
    """Turns ids into text that never has to be taken back.

    The concatenation of all returned strings is the tokenizer's decoding of all ids. U+FFFD is
    returned only for bytes that no later token can complete.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, continues: bool = False
    ) -> None:
        """Start a text.

        Args:
            skip_special_tokens: leave special tokens out.
            continues: the text continues another one, so that a leading space counts; decoders
                of the sentencepiece kind strip it where a text begins.
        """
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        # Any text would do in place of the one before: only that there is one matters.
        before = tokenizer.encode("a", add_special_tokens=False) if continues else []
        self._window: list[int] = before
        self._sent = len(self._text())  # characters of the window's text
        self._clean = len(before)  # tokens of the window up to which all text was sent
        self._unfinished = 0  # tokens since anything was sent
        self.length = 0
        """Characters returned so far."""

    def push(self, token: int) -> str:
        """Add one id; return the text that is now certain, often empty or one word."""
        # Special tokens stay out of the window: next to one, decoders strip a leading space.
        if token in self._skipped:
            return ""
        self._window.append(token)
        self._unfinished += 1
        text = self._text()
        settled = len(text.rstrip(_REPLACEMENT))
        if settled <= self._sent and self._unfinished > _LONGEST_TAIL:
            # More tokens than an unfinished character can have: these bytes stay invalid.
            settled = len(text) - min(_LONGEST_TAIL, len(text) - settled)
        new = self._take(text, settled)
        self._shrink(text)
        return new

    def flush(self) -> str:
        """Return what is held back; the output has ended."""
        text = self._text()
        return self._take(text, len(text))

    def _text(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=False)

    def _take(self, text: str, end: int) -> str:
        new = text[self._sent : end]
        if new:
            self._sent += len(new)
            self._unfinished = 0
        self.length += len(new)
        return new

    def _shrink(self, text: str) -> None:
        held = len(text) - self._sent
        if held <= 0:
            if len(self._window) > _WINDOW:
                self._cut(self._clean, held)
            self._clean = len(self._window)
        elif len(self._window) > 4 * _WINDOW:
            # Only endless invalid bytes get here; no cut can be clean.
            self._cut(len(self._window) - _WINDOW, held)
            self._clean = 0

    def _cut(self, tokens: int, held: int) -> None:
        del self._window[:tokens]
        self._sent = max(0, len(self._text()) - held)
