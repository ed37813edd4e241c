"""Which names are served, and which revision each means now.

A request resolves its model once, at admission, and keeps the revision it got: names may come to
mean another revision later without touching it.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from tp_engine.adapters.card import KnownRevision, RevisionCard
from tp_engine.adapters.errors import AdapterError, shown
from tp_engine.adapters.names import check_name, normalise, split_base, split_revision


class UnknownModel(ValueError):
    """A request names neither the base nor a registered adapter; ``code`` is for programs."""

    code = "model_not_found"

    def __init__(self, model: str) -> None:
        super().__init__(f"the model {shown(model, 300)} does not exist")
        self.model = model


class ModelHeld(ValueError):
    """A request names an adapter that takes no new ones; ``code`` is for programs."""

    code = "adapter_draining"

    def __init__(self, model: str) -> None:
        super().__init__(f"adapter {shown(model, 300)} is drained and takes no new requests")


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedModel:
    """What a request's model means at one moment."""

    name: str
    """The registered name, or the served name of the base."""
    revision: RevisionCard | None
    """None for the base alone."""

    @property
    def digest(self) -> str:
        """Of the revision; empty for the base."""
        return "" if self.revision is None else self.revision.digest


class AdapterRegistry:
    """Names -> revisions. Readers see a complete snapshot; any thread may register."""

    def __init__(self, base_names: Collection[str]) -> None:
        """``base_names`` are the served names of the base.

        Raises:
            ValueError: there is none.
        """
        if not base_names:
            raise ValueError("base_names=() must hold at least one served name")
        self.base_names = tuple(normalise(name) for name in base_names)
        self._lock = threading.Lock()
        self._snapshot: Mapping[str, RevisionCard] = MappingProxyType({})
        self._held: frozenset[str] = frozenset()

    @property
    def adapters(self) -> Mapping[str, RevisionCard]:
        """Names and their revisions, as they are now, in order of registration."""
        return self._snapshot

    @property
    def held(self) -> frozenset[str]:
        """Names that take no new requests."""
        return self._held

    def register(self, name: str, revision: KnownRevision) -> str:
        """Let a new name mean a revision; the name it is registered under (NFC) comes back.

        Raises:
            AdapterError: ``name_refused`` if the name is not allowed or is taken.
        """
        name = check_name(name, self.base_names)
        with self._lock:
            if name in self._snapshot:
                reason = f"it is registered, with revision {self._snapshot[name].digest}"
                raise AdapterError("name_refused", f"adapter name {shown(name)}: {reason}")
            self._snapshot = MappingProxyType({**self._snapshot, name: RevisionCard.of(revision)})
        return name

    def move(self, name: str, revision: KnownRevision) -> str:
        """Let a name mean a revision from now on, whatever it meant; the name in NFC comes back.

        Raises:
            AdapterError: ``name_refused`` if the name is not allowed.
        """
        name = check_name(name, self.base_names)
        with self._lock:
            self._snapshot = MappingProxyType({**self._snapshot, name: RevisionCard.of(revision)})
        return name

    def register_all(self, revisions: Mapping[str, KnownRevision]) -> None:
        """As `register`, for names that are known to be allowed and new, in one go."""
        cards = {name: RevisionCard.of(revision) for name, revision in revisions.items()}
        with self._lock:
            assert not self._snapshot.keys() & cards
            self._snapshot = MappingProxyType({**self._snapshot, **cards})

    def remove(self, name: str) -> None:
        """Let a registered name mean nothing; whoever resolved it before keeps the revision."""
        with self._lock:
            rest = {known: kept for known, kept in self._snapshot.items() if known != name}
            self._snapshot = MappingProxyType(rest)
            self._held -= {name}

    def hold(self, name: str) -> None:
        """Let a registered name take no new requests; it goes on to mean what it means."""
        with self._lock:
            self._held |= {name}

    def release(self, name: str) -> None:
        """Let a name take requests again."""
        with self._lock:
            self._held -= {name}

    def resolve(self, model: str) -> ResolvedModel:
        """What a new request's ``model`` means now.

        Raises:
            UnknownModel: as `find`.
            ModelHeld: it takes no new requests.
        """
        resolved = self.find(model)
        if resolved.name in self._held and resolved.revision is not None:
            raise ModelHeld(resolved.name)
        return resolved

    def find(self, model: str) -> ResolvedModel:
        """What a ``model`` means now, whether it takes requests or not.

        An exact name wins before any other form is read into it; see `tp_engine.adapters.names`.

        Raises:
            UnknownModel: it means nothing; the base never answers in an adapter's place.
        """
        adapters = self._snapshot
        name = normalise(model)
        if name in self.base_names:
            return ResolvedModel(name=name, revision=None)
        if name in adapters:
            return ResolvedModel(name=name, revision=adapters[name])
        short = split_base(name, self.base_names) or name
        if short in adapters:
            return ResolvedModel(name=short, revision=adapters[short])
        parts = split_revision(short)
        if parts is not None:
            found = adapters.get(parts[0])
            if found is not None and found.digest.startswith(parts[1]):
                return ResolvedModel(name=parts[0], revision=found)
        raise UnknownModel(model)
