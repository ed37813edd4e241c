"""Stop strings in a stream of text.

Semantics: the output is cut at the leftmost place where any stop string begins in the whole
text; of several that begin there, the shortest is the reason. How the text is split into pieces
makes no difference.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Passes text on, short of what is or may yet become a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = list(stops)
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text."""

    def push(self, text: str) -> str:
        """Add text; return what is certain to precede any stop string.

        Once `matched` is set the text has ended: further text is dropped.
        """
        return self._advance(text, final=False) if self._stops else text

    def flush(self) -> str:
        """Return what is held back; the text has ended."""
        return self._advance("", final=True)

    def _advance(self, text: str, *, final: bool) -> str:
        if self.matched is not None:
            return ""
        held = self._held + text
        at, stop = self._leftmost(held)
        partial = len(held) if final else self._partial(held)
        # A match waits while a longer stop string that began before it may still come true.
        if stop is not None and at <= partial:
            self.matched = stop
            self._held = ""
            return held[:at]
        self._held = held[partial:]
        return held[:partial]

    def _leftmost(self, text: str) -> tuple[int, str | None]:
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        return min(found, default=(len(text), None), key=lambda match: (match[0], len(match[1])))

    def _partial(self, text: str) -> int:
        """Start of the longest tail of ``text`` that begins a stop string and is shorter."""
        first, holder = len(text), None
        for stop in self._stops:
            at = text.find(stop[0], max(0, len(text) - len(stop) + 1), first)
            while at >= 0:
                if stop.startswith(text[at:]):
                    first, holder = at, stop
                    break
                at = text.find(stop[0], at + 1, first)
        if holder is not None:
            # First the next time: what it goes on holding need not be searched for all the others.
            self._stops.remove(holder)
            self._stops.insert(0, holder)
        return first
