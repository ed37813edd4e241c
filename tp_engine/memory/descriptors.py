"""Stretches of the tensor that holds the descriptor records of resident adapters."""

from __future__ import annotations


class DescriptorSpace:
    """First-fit allocation of stretches of the descriptor tensor."""

    def __init__(self, words: int) -> None:
        self._gaps = [(0, words)]

    def take(self, words: int) -> int | None:
        """The start of a free stretch, or None."""
        for i, (start, end) in enumerate(self._gaps):
            if end - start >= words:
                self._gaps[i : i + 1] = [(start + words, end)] if end - start > words else []
                return start
        return None

    def give_back(self, start: int, words: int) -> None:
        """Free a stretch and join it with its neighbours."""
        merged: list[tuple[int, int]] = []
        for gap in sorted([*self._gaps, (start, start + words)]):
            if merged and merged[-1][1] == gap[0]:
                merged[-1] = (merged[-1][0], gap[1])
            else:
                merged.append(gap)
        self._gaps = merged
