"""Calls of the control plane, from the front end to the engine, and their answers."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tp_engine.messages.base import Message

# --- front end to engine ---------------------------------------------------------------------


class LoadAdapter(Message, frozen=True, kw_only=True):
    """Read an adapter and let a name mean it.

    Answered by `AdapterReply` when requests may use it.
    """

    call_id: str
    """Unique among open calls."""
    name: str
    path: str
    """Directory on rank 0's host, inside one of the allowed ones."""
    in_place: bool = False
    """Whether a loaded adapter of this name is replaced; else it is refused."""


class MoveAdapter(Message, frozen=True, kw_only=True):
    """Let a name mean another revision of the store. Answered by `AdapterReply` when it does."""

    call_id: str
    name: str
    revision: str | None
    """SHA-256 of the revision, in hex; None: what the name meant before its last move."""


class ListAdapters(Message, frozen=True, kw_only=True):
    """Tell of the adapters whose names come after ``after``. Answered by `AdapterList`."""

    call_id: str
    after: str = ""
    limit: int = 100
    name: str | None = None
    """Only this one, if it is there."""


class UnloadAdapter(Message, frozen=True, kw_only=True):
    """Let a name mean nothing. Answered by `AdapterReply` at once; running requests go on."""

    call_id: str
    name: str


AdapterCall = LoadAdapter | MoveAdapter | UnloadAdapter | ListAdapters


# --- engine to front end ---------------------------------------------------------------------


class AdapterReply(Message, frozen=True, kw_only=True):
    """What became of a call; nothing more follows."""

    call_id: str
    code: str | None = None
    """Why it was refused, for programs; None: it was done."""
    message: str = ""
    """Why it was refused, for people."""
    revision: str | None = None
    """SHA-256 of the revision that was loaded or unloaded, in hex."""
    applied: int = 0
    """Modules applied."""
    expected: int = 0
    """Modules that the adapter's config targets."""
    warnings: Sequence[str] = ()


class AdapterStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of an adapter now."""

    name: str
    revision: str
    """SHA-256 of its canonical config and tensors, in hex."""
    source: str
    """Directory it was read from."""
    max_rank: int
    """The largest LoRA rank of any module."""
    modules: int
    """Modules that it changes."""
    pages: int
    """Arena pages that it takes on each rank when resident."""
    resident: bool
    """Whether it stands in the arena."""
    requests: int
    """Open requests of its revision, under any name."""
    history: list[str] = []
    """Revisions that the name meant, the present one first; of the store."""


class AdapterList(Message, frozen=True, kw_only=True):
    """Answer to `ListAdapters`."""

    call_id: str
    adapters: list[AdapterStatus]
    """In the order of their names."""


AdapterAnswer = AdapterReply | AdapterList
