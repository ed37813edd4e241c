"""Revisions on their way to a name.

    read and packed (the reader) ─> delivered to all ranks
    ─> the store's name moves (the recorder) ─> the name moves

A push leaves the third step to `tp_engine.fleet.dirty`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tp_engine.adapters import AdapterError, AdapterRevision
from tp_engine.adapters.errors import OutOfMemory, shown
from tp_engine.adapters.names import check_name
from tp_engine.adapters.store import StoreError
from tp_engine.fleet.errands import CallError, LetGo, Loaded, Loading
from tp_engine.fleet.leaving import Leaving
from tp_engine.fleet.shared import Shared, refusal
from tp_engine.messages import AdapterReply, LoadAdapter, MoveAdapter, PushAdapter


class Arriving:
    """The loads, moves and pushes under way, at most one a name."""

    def __init__(
        self, shared: Shared, leaving: Leaving, arrived: Callable[[Loading], AdapterReply]
    ) -> None:
        """Begin with none.

        Args:
            shared: the fleet's.
            leaving: takes what did not get its name.
            arrived: lets a name mean a revision that all ranks have, and answers.
        """
        self._shared = shared
        self._leaving = leaving
        self._arrived = arrived
        self._loading: dict[str, Loading] = {}

    @property
    def busy(self) -> bool:
        """Whether `turn` has something to wait for."""
        return bool(self._loading)

    def read(self) -> set[str]:
        """Digests of the revisions under way, as far as they are known."""
        return {each.revision.digest for each in self._loading.values() if each.revision}

    def is_free(self, name: str) -> bool:
        """Whether nothing is on its way to a name."""
        return name not in self._loading

    def check_free(self, name: str) -> str:
        """The name as it is registered.

        Raises:
            AdapterError: it is not allowed.
            CallError: something is on its way to it.
        """
        name = check_name(name, self._shared.registry.base_names)
        if not self.is_free(name):
            raise CallError("adapter_loading", f"adapter {shown(name)} is being loaded already")
        return name

    def begin(
        self,
        call: LoadAdapter | MoveAdapter | PushAdapter,
        name: str,
        load: Callable[[], Loaded],
        record: Callable[[str, str], LetGo] | None,
    ) -> None:
        """Begin to load something for a free name; ``record`` makes it last."""
        self._loading[name] = Loading(call, name, self._shared.reader.submit(load), record)

    def turn(self) -> list[AdapterReply]:
        """Do what can be done now; the answers to what is over."""
        replies = []
        for loading in list(self._loading.values()):
            reply = self._advance(loading)
            if reply is not None:
                del self._loading[loading.name]
                replies.append(reply)
        return replies

    def _advance(self, loading: Loading) -> AdapterReply | None:
        code: str
        try:
            if not self._take_steps(loading):
                return None
            reply = self._arrived(loading)
            self._settle(loading)
            return reply
        except OutOfMemory as error:
            code, text = error.code, f"adapter {shown(loading.name)}: {error}"
        except (AdapterError, StoreError, CallError) as error:
            code, text = error.code, str(error)
        except ValueError as error:
            code, text = "adapter_too_large", str(error)
        except (FileNotFoundError, PermissionError) as error:
            code, text = "unreadable", str(error)
        except OSError as error:  # a reader turns its own into an AdapterError
            code, text = "store_failed", str(error)
        if loading.revision is not None:
            self._settle(loading)
            self._leaving.let_go(loading.revision.digest)
        return refusal(loading.call.call_id, code, text)

    def _take_steps(self, loading: Loading) -> bool:
        """Whether all ranks have it and the store knows, as far as it must."""
        revision = loading.revision or self._take_read(loading)
        if revision is None or not self._shared.engine.roster.has(revision.digest):
            return False
        if loading.record is None:
            return True
        if loading.recorded is None:
            loading.recorded = self._shared.recorder.submit(
                loading.record, loading.name, revision.digest
            )
        if not loading.recorded.done():
            return False
        self._leaving.discard(loading.recorded.result())
        return True

    def _settle(self, loading: Loading) -> None:
        assert loading.revision is not None
        self._shared.tidy(partial(self._shared.loader.settled, loading.revision.digest))

    def _take_read(self, loading: Loading) -> AdapterRevision | None:
        """Begin to deliver what the thread has read, if it has."""
        if not loading.loaded.done():
            return None
        loading.revision, images = loading.loaded.result()
        roster = self._shared.engine.roster
        roster.deliver(loading.name, loading.revision, images)
        roster.adopt_delivered()
        return loading.revision
