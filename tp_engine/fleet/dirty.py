"""Names that mean what was pushed, before the store knows.

    mark ─> (an interval passes, or it is asked for, or the service stops) ─> its files are kept
    (the reader) ─> its name is written (the recorder) ─> clean, unless it was pushed to meanwhile

A name has one dirty revision, the newest: one that is pushed over before it is written is never
written, and goes when its last request has ended. In the store the next write-back of a name takes
the place of the one before, so that a training loop leaves one revision and one step to roll back,
however long it runs; promoting a revision makes it last.
"""

from __future__ import annotations

import logging
import math
import time
from concurrent.futures import Future
from dataclasses import dataclass

from tp_engine.adapters.errors import shown
from tp_engine.fleet.errands import LetGo
from tp_engine.fleet.leaving import Leaving
from tp_engine.fleet.shared import Shared
from tp_engine.messages import AdaptersFlushed, FlushAdapters

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Unsaved:
    """What a name means and the store does not know."""

    name: str
    digest: str
    due: float
    """When it is written back, as `time.monotonic` counts."""
    writing: Future[LetGo] | None = None
    error: str = ""
    """Why the last attempt failed."""
    put_away: bool = False
    """Whether the stop of the service has begun to write it."""
    gone: bool = False
    """Whether the name means nothing any more, so that it must not be named in the store; set
    before the store is asked to erase the name."""


class Dirty:
    """The dirty names."""

    def __init__(self, shared: Shared, leaving: Leaving, interval: float) -> None:
        """Begin with none; ``interval`` is how many seconds one may stay so, 0: for ever."""
        self._shared = shared
        self._leaving = leaving
        self._interval = interval or math.inf
        self._names: dict[str, Unsaved] = {}
        self._abandoned: list[Unsaved] = []
        """What is being written while its name means something else already, or nothing."""
        self._flushes: list[tuple[FlushAdapters, list[str]]] = []

    @property
    def busy(self) -> bool:
        """Whether `turn` has something to wait for within moments."""
        writing = any(unsaved.writing for unsaved in self._names.values())
        return bool(writing or self._flushes or self._abandoned)

    @property
    def names(self) -> list[str]:
        """The dirty names."""
        return list(self._names)

    @property
    def digests(self) -> set[str]:
        """The dirty revisions."""
        return {unsaved.digest for unsaved in self._names.values()}

    def find(self, name: str) -> Unsaved | None:
        """What a name means that the store does not know."""
        return self._names.get(name)

    def mark(self, name: str, digest: str) -> None:
        """A name means what was pushed; when it was dirty before, that is not put off."""
        before = self._names.get(name)
        due = time.monotonic() + self._interval
        if before is not None and before.writing is None:
            due = before.due
        self.clear(name)
        self._names[name] = Unsaved(name, digest, due)

    def clear(self, name: str) -> None:
        """A name means something else now, which is kept in another way, or nothing."""
        before = self._names.pop(name, None)
        if before is not None and before.writing is not None:
            self._abandoned.append(before)

    def gone(self, name: str) -> None:
        """A name means nothing any more: nothing that is being written is to be named so."""
        self.clear(name)
        for unsaved in self._abandoned:
            unsaved.gone |= unsaved.name == name

    def begin(self, name: str) -> Future[LetGo] | None:
        """Begin to write back what a name means; None if the store knows it."""
        unsaved = self._names.get(name)
        if unsaved is None:
            return None
        if unsaved.writing is None:
            unsaved.writing = self._shared.reader.submit(self._write_back, unsaved)
        return unsaved.writing

    def begin_all(self) -> None:
        """Begin to write back everything that has not just failed to be."""
        for name, unsaved in self._names.items():
            if not unsaved.error:
                self.begin(name)

    def put_away(self) -> bool:
        """Write back everything for the stop of the service; whether all was tried."""
        for name, unsaved in self._names.items():
            if not unsaved.put_away:
                unsaved.put_away = True
                self.begin(name)
        return not self.busy

    def flush(self, call: FlushAdapters) -> None:
        """Write back one name or all, and answer when that is done."""
        names = [name for name in self._names if call.name in (None, name)]
        for name in names:
            self.begin(name)
        self._flushes.append((call, names))

    def turn(self) -> list[AdaptersFlushed]:
        """Begin what is due and take up what is written; the answers to flushes."""
        for name, unsaved in list(self._names.items()):
            if unsaved.writing is None and time.monotonic() >= unsaved.due:
                self.begin(name)
            elif unsaved.writing is not None and unsaved.writing.done():
                self._written(name, unsaved, unsaved.writing)
        for unsaved in list(self._abandoned):
            if unsaved.writing is not None and unsaved.writing.done():
                self._abandoned.remove(unsaved)
                self._take(unsaved.writing)
        answers = [self._answer(call, names) for call, names in self._flushes if self._done(names)]
        self._flushes = [flush for flush in self._flushes if not self._done(flush[1])]
        return answers

    def _write_back(self, unsaved: Unsaved) -> LetGo:
        """In the reader's thread."""
        if unsaved.gone:
            return []
        recorder = self._shared.recorder
        return self._shared.loader.write_back(
            unsaved.digest, lambda: recorder.submit(self._record, unsaved).result()
        )

    def _record(self, unsaved: Unsaved) -> LetGo:
        """In the recorder's thread: before the name is erased, or not at all."""
        if unsaved.gone:
            return []
        return self._shared.loader.record_pushed(unsaved.name, unsaved.digest)

    def _written(self, name: str, unsaved: Unsaved, writing: Future[LetGo]) -> None:
        unsaved.writing = None
        unsaved.error = self._take(writing)
        if not unsaved.error:
            del self._names[name]
            return
        unsaved.due = time.monotonic() + self._interval
        log.error("adapter %s is not written back: %s", shown(name), unsaved.error)

    def _take(self, writing: Future[LetGo]) -> str:
        """Why it failed; empty if it is written."""
        try:
            self._leaving.discard(writing.result())
        except (ValueError, OSError) as error:
            return str(error) or type(error).__name__
        return ""

    def _done(self, names: list[str]) -> bool:
        found = (self._names.get(name) for name in names)
        return all(unsaved is None or unsaved.writing is None for unsaved in found)

    def _answer(self, call: FlushAdapters, names: list[str]) -> AdaptersFlushed:
        left = {name: self._names[name].error for name in names if name in self._names}
        failed = {name: error for name, error in left.items() if error}
        named = self._shared.registry.adapters
        return AdaptersFlushed(
            call_id=call.call_id,
            # Nor pushed to meanwhile, nor unloaded.
            written=[name for name in names if name not in left and name in named],
            failed=failed,
        )
