"""What all parts of the fleet work with."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial

from tp_engine.adapters import AdapterRegistry
from tp_engine.engine import Engine
from tp_engine.fleet.errands import Loader
from tp_engine.messages import AdapterReply

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Shared:
    """One fleet's collaborators."""

    engine: Engine
    registry: AdapterRegistry
    """What names mean; the fleet alone changes it while the service runs."""
    loader: Loader
    """Does what is slow."""
    reader: Executor
    """The one thread that reads, keeps and deletes revisions; it may wait for the other."""
    recorder: Executor
    """The one thread that changes and looks up names of the store, and never waits for a read."""

    def tidy(self, work: Callable[[], None]) -> None:
        """Have the reader do something that nobody waits for."""
        self.reader.submit(partial(_logged, work))


def _logged(work: Callable[[], None]) -> None:
    try:
        work()
    except Exception:  # nobody asks for the result: what is not logged here is lost
        log.exception("tidying up after an adapter failed")


def refusal(call_id: str, code: str, message: str) -> AdapterReply:
    """The answer to a call that is not done."""
    return AdapterReply(call_id=call_id, code=code, message=message)
