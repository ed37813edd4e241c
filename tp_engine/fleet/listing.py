"""What operators may see of the fleet."""

from __future__ import annotations

from concurrent.futures import Future

from tp_engine.fleet.shared import Shared
from tp_engine.messages import AdapterList, AdapterStatus, ListAdapters


class Listing:
    """Answers `ListAdapters`: histories come from the store, in another thread, the rest is at
    hand in the loop."""

    def __init__(self, shared: Shared) -> None:
        """Look at a fleet."""
        self._shared = shared
        self._open: list[tuple[ListAdapters, Future[dict[str, list[str]]]]] = []

    @property
    def busy(self) -> bool:
        """Whether `finished` has something to wait for."""
        return bool(self._open)

    def begin(self, call: ListAdapters) -> None:
        """Begin to answer a call."""
        shared = self._shared
        names = sorted(name for name in shared.registry.adapters if name > call.after)
        if call.name is not None:
            names = [name for name in names if name == call.name]
        kept = names[: call.limit]
        histories = shared.reader.submit(
            lambda: {name: shared.loader.history(name) for name in kept}
        )
        self._open.append((call, histories))

    def finished(self) -> list[AdapterList]:
        """The answers that are ready."""
        answers = []
        while self._open and self._open[0][1].done():
            call, histories = self._open.pop(0)
            adapters = [
                self._status(name, history)
                for name, history in histories.result().items()
                if name in self._shared.registry.adapters  # or it went meanwhile
            ]
            answers.append(AdapterList(call_id=call.call_id, adapters=adapters))
        return answers

    def _status(self, name: str, history: list[str]) -> AdapterStatus:
        engine = self._shared.engine
        revision = self._shared.registry.adapters[name]
        footprint = engine.adapters[revision.digest]
        return AdapterStatus(
            name=name,
            revision=revision.digest,
            source=revision.source,
            max_rank=footprint.max_rank,
            modules=revision.applied,
            pages=footprint.pages,
            resident=engine.residency.is_resident(footprint.handle),
            requests=len(engine.users_of(revision.digest)),
            history=history,
        )
