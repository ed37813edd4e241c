"""Which revisions keep their copies on the hosts, whoever asks for the room.

Pinned ones do, in the order of their names, as long as the largest adapter finds room beside them:
so no request waits for ever for want of room. Dirty ones do until they are written back, which is
begun at once when somebody waits for their room.
"""

from __future__ import annotations

from collections.abc import Mapping

from tp_engine.fleet.dirty import Dirty
from tp_engine.fleet.shared import Shared


class Holds:
    """The holds of names that are pinned or dirty."""

    def __init__(self, shared: Shared, dirty: Dirty, pinned: set[str]) -> None:
        """Begin; ``pinned`` is changed by others."""
        self._shared = shared
        self._dirty = dirty
        self._pinned = pinned
        self._seen: tuple[Mapping[str, object], int, frozenset[str]] | None = None
        self._fitting: set[str] = set()

    def turn(self) -> None:
        """Hold what must stay now, and nothing else."""
        engine = self._shared.engine
        if engine.tiers.starved:
            self._dirty.begin_all()
        self._fit()
        engine.roster.keep(self._fitting | self._dirty.digests)

    def _fit(self) -> None:
        """Find the pinned revisions that fit, when anything has changed."""
        named, roster = self._shared.registry.adapters, self._shared.engine.roster
        seen = named, roster.changes, frozenset(self._pinned)
        if self._seen is not None and self._seen[0] is named and self._seen[1:] == seen[1:]:
            return
        self._seen = seen
        room = self._shared.engine.tiers.host.num_pages - roster.largest
        self._fitting = set()
        for name in sorted(seen[2]):
            digest = named[name].digest if name in named else ""
            if digest in roster.adapters and digest not in self._fitting:
                room -= roster.adapters[digest].pages
                if room < 0:
                    break
                self._fitting.add(digest)
