"""Revisions on their way to a name.

read and packed (a thread) ─> delivered to all ranks ─> the store's name moves (a thread)
─> the name moves
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future

from tp_engine.adapters import AdapterError, AdapterRevision
from tp_engine.adapters.errors import shown
from tp_engine.adapters.names import check_name
from tp_engine.adapters.store import StoreError
from tp_engine.fleet.errands import CallError, Loaded, Loading
from tp_engine.fleet.shared import Shared, refusal
from tp_engine.messages import AdapterReply, LoadAdapter, MoveAdapter

log = logging.getLogger(__name__)


class Arriving:
    """The loads and moves under way, at most one a name."""

    def __init__(self, shared: Shared, arrived: Callable[[str, AdapterRevision], None]) -> None:
        """Begin with none; ``arrived`` lets a name mean a revision that all ranks have."""
        self._shared = shared
        self._arrived = arrived
        self._loading: dict[str, Loading] = {}

    @property
    def busy(self) -> bool:
        """Whether `turn` has something to wait for."""
        return bool(self._loading)

    def read(self) -> set[str]:
        """Digests of the revisions under way, as far as they are known."""
        return {each.revision.digest for each in self._loading.values() if each.revision}

    def check_free(self, name: str) -> str:
        """The name as it is registered.

        Raises:
            AdapterError: it is not allowed.
            CallError: something is on its way to it.
        """
        name = check_name(name, self._shared.registry.base_names)
        if name in self._loading:
            raise CallError("adapter_loading", f"adapter {shown(name)} is being loaded already")
        return name

    def begin(
        self,
        call: LoadAdapter | MoveAdapter,
        name: str,
        load: Callable[[], Loaded],
        record: Callable[[str, str], None],
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
        try:
            return self._take_steps(loading)
        except (AdapterError, StoreError) as error:
            return refusal(loading.call.call_id, error.code, str(error))
        except ValueError as error:
            return refusal(loading.call.call_id, "adapter_too_large", str(error))
        except OSError as error:
            return refusal(loading.call.call_id, "unreadable", str(error))

    def _take_steps(self, loading: Loading) -> AdapterReply | None:
        revision = loading.revision or self._take_read(loading.loaded, loading)
        if revision is None or revision.digest not in self._shared.engine.roster.adapters:
            return None
        if loading.recorded is None:
            loading.recorded = self._shared.reader.submit(
                loading.record, loading.name, revision.digest
            )
        if not loading.recorded.done():
            return None
        loading.recorded.result()
        self._arrived(loading.name, revision)
        log.info("adapter %s is loaded, revision %s", shown(loading.name), revision.digest)
        return AdapterReply(
            call_id=loading.call.call_id,
            revision=revision.digest,
            applied=revision.applied,
            expected=revision.expected,
            warnings=list(revision.warnings),
        )

    def _take_read(self, loaded: Future[Loaded], loading: Loading) -> AdapterRevision | None:
        """Begin to deliver what the thread has read, if it has."""
        if not loaded.done():
            return None
        loading.revision, images = loaded.result()
        roster = self._shared.engine.roster
        roster.deliver(loading.name, loading.revision, images)
        roster.adopt_delivered()
        return loading.revision
