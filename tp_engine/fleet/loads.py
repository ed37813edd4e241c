"""Calls that bring a revision on its way to a name; an exception refuses them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from tp_engine.adapters import AdapterError
from tp_engine.adapters.errors import shown
from tp_engine.fleet.arriving import Arriving
from tp_engine.fleet.dirty import Dirty
from tp_engine.fleet.errands import CallError, Loaded
from tp_engine.fleet.roots import Roots
from tp_engine.fleet.shared import Shared
from tp_engine.messages import LoadAdapter, MoveAdapter, PushAdapter


class Loads:
    """Begins loads, moves and pushes."""

    def __init__(self, shared: Shared, roots: Roots, arriving: Arriving, dirty: Dirty) -> None:
        """Begin them with the parts of a fleet."""
        self._shared = shared
        self._roots = roots
        self._arriving = arriving
        self._dirty = dirty

    def load(self, call: LoadAdapter) -> None:
        """Begin to let a name mean what lies in a directory."""
        name, loader = self._arriving.check_free(call.name), self._shared.loader
        named = self._shared.registry.adapters
        if name in named and not call.in_place:
            raise CallError(
                "adapter_exists",
                f"adapter {shown(name)} is loaded, with revision {named[name].digest}; "
                "load_inplace=true replaces it",
            )

        def load() -> Loaded:
            directory = self._roots.allowed(call)  # which may lie on a disk that is slow to answer
            return loader.load(directory, call.source)

        self._arriving.begin(call, name, self._once_clean(name, load), loader.record)

    def move(self, call: MoveAdapter) -> None:
        """Begin to let a name mean another revision of the store."""
        name, loader = self._arriving.check_free(call.name), self._shared.loader
        record = loader.record if call.revision is not None else loader.roll_back

        def load() -> Loaded:
            which = self._shared.recorder.submit(loader.which, name, call.revision)
            return loader.load_kept(which.result())

        self._arriving.begin(call, name, self._once_clean(name, load), record)

    def push(self, call: PushAdapter) -> None:
        """Begin to let a name mean what was pushed."""
        directory, loader = Path(call.directory), self._shared.loader
        try:
            name = self._arriving.check_free(call.name)
        except (AdapterError, CallError):
            self._shared.tidy(partial(loader.drop, directory))
            raise
        self._arriving.begin(call, name, partial(loader.load_pushed, directory), None)

    def _once_clean(self, name: str, load: Callable[[], Loaded]) -> Callable[[], Loaded]:
        """A load after which a roll back leads to what the name means now, so that is written."""
        writing = self._dirty.begin(name)
        if writing is None:
            return load

        def written_first() -> Loaded:
            writing.result()  # by this very thread, just before
            return load()

        return written_first
