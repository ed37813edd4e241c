"""How often names are asked for."""

from __future__ import annotations

import time


class Usage:
    """Requests by name, since the service began."""

    def __init__(self) -> None:
        """Begin with none."""
        self._hits: dict[str, int] = {}
        self._last: dict[str, float] = {}

    def count(self, name: str) -> None:
        """A request for a name."""
        self._hits[name] = self.hits(name) + 1
        self._last[name] = time.time()

    def hits(self, name: str) -> int:
        """Requests so far."""
        return self._hits.get(name, 0)

    def last(self, name: str) -> float | None:
        """When the last one came, in Unix seconds."""
        return self._last.get(name)

    def forget(self, name: str) -> None:
        """The name means nothing any more."""
        self._hits.pop(name, None)
        self._last.pop(name, None)
