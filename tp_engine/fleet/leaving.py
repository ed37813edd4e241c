"""Revisions that no name means any more, until nothing is left of them.

let_go ─> its requests end, or are ended at the deadline ─> forgotten on all ranks
─> deleted from the store (the reader), unless a name could be rolled back to it
"""

from __future__ import annotations

import time
from functools import partial

from tp_engine.fleet.errands import LetGo
from tp_engine.fleet.shared import Shared
from tp_engine.messages import Failed


class Leaving:
    """The revisions that drain."""

    def __init__(self, shared: Shared, drain_timeout: float) -> None:
        """Begin with none; ``drain_timeout`` is how many seconds requests may still take."""
        self._shared = shared
        self._drain_timeout = drain_timeout
        self._deadlines: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._deadlines)

    @property
    def busy(self) -> bool:
        """Whether `turn` has something to wait for."""
        return bool(self._deadlines)

    def let_go(self, digest: str) -> None:
        """Forget a revision once its requests have ended, unless a name means it."""
        if any(kept.digest == digest for kept in self._shared.registry.adapters.values()):
            return
        if digest in self._shared.engine.adapters:
            deadline = time.monotonic() + self._drain_timeout
            self._deadlines.setdefault(digest, deadline)  # else what fails puts it off
        else:
            self.discard([digest])

    def keep(self, digest: str) -> None:
        """A name means it again."""
        self._deadlines.pop(digest, None)

    def discard(self, digests: LetGo) -> None:
        """Delete from the store what no name refers to, now or once it has drained."""
        for digest in digests:
            if digest not in self._shared.engine.adapters:
                self._shared.tidy(partial(self._shared.loader.discard, digest))

    def turn(self, wanted: set[str]) -> list[Failed]:
        """Forget what has drained; the requests that had to be ended.

        Args:
            wanted: revisions that are about to get a name.
        """
        ended: list[Failed] = []
        for digest, deadline in list(self._deadlines.items()):
            if digest not in wanted:
                ended += self._drain(digest, deadline)
        return ended

    def _drain(self, digest: str, deadline: float) -> list[Failed]:
        engine = self._shared.engine
        users = engine.users_of(digest)
        if users and time.monotonic() <= deadline:
            return []
        text = f"the adapter was unloaded and this took more than {self._drain_timeout:g} s"
        for request_id in users:
            engine.abort(request_id)
        engine.unregister(digest)
        del self._deadlines[digest]
        self.discard([digest])
        return [
            Failed(request_id=request_id, code="adapter_unloaded", message=text)
            for request_id in users
        ]
