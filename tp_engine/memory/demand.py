"""Who wants which adapter: one book for all tiers, by handle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from tp_engine.memory.worth import UNUSED, count_use


class Demand:
    """Uses, open requests and holds of each adapter."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """``clock`` gives seconds."""
        self._clock = clock
        self._weights: dict[int, float] = {}
        self._references: Counter[int] = Counter()
        self._holds: Counter[int] = Counter()
        self._watchers: list[Callable[[int], None]] = []

    def watch(self, changed: Callable[[int], None]) -> None:
        """Have a function called with the handle of whatever begins or ceases to be wanted."""
        self._watchers.append(changed)

    def use(self, handle: int) -> None:
        """Count a request that is admitted with it."""
        self._weights[handle] = count_use(self.weight(handle), self._clock())

    def weight(self, handle: int) -> float:
        """Of its uses so far, see `tp_engine.memory.worth`."""
        return self._weights.get(handle, UNUSED)

    def refer(self, handle: int) -> None:
        """A request for it is open, waiting or running."""
        self._references[handle] += 1
        self._tell(handle)

    def let_go(self, handle: int) -> None:
        """A request for it has ended."""
        assert self._references[handle] > 0
        self._references[handle] -= 1
        self._tell(handle)

    def hold(self, handle: int) -> None:
        """Keep its host copy, whoever asks for it: it is pinned, or the only copy there is."""
        self._holds[handle] += 1
        self._tell(handle)

    def release(self, handle: int) -> None:
        """Take one `hold` back."""
        assert self._holds[handle] > 0
        self._holds[handle] -= 1
        self._tell(handle)

    def is_wanted(self, handle: int) -> bool:
        """Whether a request for it is open or somebody holds it."""
        return self._references[handle] > 0 or self._holds[handle] > 0

    def is_held(self, handle: int) -> bool:
        """Whether somebody holds its host copy."""
        return self._holds[handle] > 0

    def forget(self, handle: int) -> None:
        """An adapter is known no more."""
        self._weights.pop(handle, None)
        del self._references[handle], self._holds[handle]

    def _tell(self, handle: int) -> None:
        for changed in self._watchers:
            changed(handle)
