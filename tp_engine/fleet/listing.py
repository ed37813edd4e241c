"""What operators may see of the fleet."""

from __future__ import annotations

from concurrent.futures import Executor, Future

from tp_engine.adapters import AdapterRegistry
from tp_engine.engine import Engine
from tp_engine.fleet.errands import Loader
from tp_engine.messages import AdapterList, AdapterStatus, ListAdapters


class Listing:
    """Answers `ListAdapters`: histories come from the store, in another thread, the rest is at
    hand in the loop."""

    def __init__(
        self, engine: Engine, registry: AdapterRegistry, loader: Loader, reader: Executor
    ) -> None:
        """Look at a fleet; ``reader`` is the thread that the loader's methods are called in."""
        self._engine = engine
        self._registry = registry
        self._loader = loader
        self._reader = reader
        self._open: list[tuple[ListAdapters, Future[dict[str, list[str]]]]] = []

    @property
    def busy(self) -> bool:
        """Whether `finished` has something to wait for."""
        return bool(self._open)

    def begin(self, call: ListAdapters) -> None:
        """Begin to answer a call."""
        names = sorted(name for name in self._registry.adapters if name > call.after)
        if call.name is not None:
            names = [name for name in names if name == call.name]
        kept = names[: call.limit]
        histories = self._reader.submit(lambda: {name: self._loader.history(name) for name in kept})
        self._open.append((call, histories))

    def finished(self) -> list[AdapterList]:
        """The answers that are ready."""
        answers = []
        while self._open and self._open[0][1].done():
            call, histories = self._open.pop(0)
            adapters = [
                self._status(name, history)
                for name, history in histories.result().items()
                if name in self._registry.adapters  # or it went meanwhile
            ]
            answers.append(AdapterList(call_id=call.call_id, adapters=adapters))
        return answers

    def _status(self, name: str, history: list[str]) -> AdapterStatus:
        revision = self._registry.adapters[name]
        footprint = self._engine.adapters[revision.digest]
        return AdapterStatus(
            name=name,
            revision=revision.digest,
            source=revision.source,
            max_rank=footprint.max_rank,
            modules=revision.applied,
            pages=footprint.pages,
            resident=self._engine.residency.is_resident(footprint.handle),
            requests=len(self._engine.users_of(revision.digest)),
            history=history,
        )
