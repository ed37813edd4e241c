"""What it takes to bring something back into the arena, as measured while the engine runs."""

from __future__ import annotations

LOAD_SECONDS = 1e-3
"""Of every load, however small."""
PROMPT_TOKENS = 64
"""Of a step, from which on it shows what a token costs."""
_SHARE = 0.2
"""Of a new measurement in the running mean."""


class Prices:
    """Seconds: of keys and values computed again, of adapters loaded again.

    They begin with the order of magnitude that a GPU and a local disk have, so that the first
    decisions are sensible, and follow what is measured.
    """

    def __init__(self, page_bytes: int, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self.kv = block_tokens / 10_000
        """Of a page of keys and values."""
        self._copy = page_bytes / 10e9
        self._fetch = page_bytes / 0.5e9
        self._step_ended = 0.0

    def warm_load(self, pages: int) -> float:
        """Of an adapter from the hosts into the arena."""
        return LOAD_SECONDS + pages * self._copy

    def cold_load(self, pages: int) -> float:
        """Of an adapter from the store to the hosts."""
        return LOAD_SECONDS + pages * self._fetch

    def step_ended(self, prompt_tokens: int, began: float, ended: float) -> None:
        """A step has computed so many prompt tokens; others may have been under way with it."""
        seconds = ended - max(began, self._step_ended)
        self._step_ended = ended
        if prompt_tokens >= PROMPT_TOKENS:
            self.kv += _SHARE * (self._block_tokens * max(seconds, 1e-9) / prompt_tokens - self.kv)

    def copied(self, pages: int, seconds: float) -> None:
        """Pages of an adapter that came from the hosts."""
        self._copy += _SHARE * (seconds / pages - self._copy)

    def fetched(self, pages: int, seconds: float) -> None:
        """Pages of an adapter that came from the store to all hosts."""
        self._fetch += _SHARE * (seconds / pages - self._fetch)
