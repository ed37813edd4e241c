"""Calls of the control plane, from the front end to the engine, and their answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

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
    source: str = ""
    """Where the front end has it from, if it fetched it to ``path``; empty: it lies there."""
    in_place: bool = False
    """Whether a loaded adapter of this name is replaced; else it is refused."""


class MoveAdapter(Message, frozen=True, kw_only=True):
    """Let a name mean another revision of the store. Answered by `AdapterReply` when it does."""

    call_id: str
    name: str
    revision: str | None
    """SHA-256 of the revision, in hex, or 12 or more first digits of one that the name has meant;
    None: what it meant before its last move."""


class ListAdapters(Message, frozen=True, kw_only=True):
    """Tell of the adapters whose names come after ``after``. Answered by `AdapterList`."""

    call_id: str
    after: str = ""
    limit: int = 100
    name: str | None = None
    """Only this one, if it is there, with its manifest."""
    prefix: str = ""
    """Only those whose names begin so."""
    state: str = ""
    """Only those in this state; empty: in any."""
    base: str = ""
    """Only those whose revision was registered for the base whose SHA-256 begins so, in hex."""


class PushAdapter(Message, frozen=True, kw_only=True):
    """Let a name mean tensors that were just sent.

    Answered by `AdapterReply` when requests may use them; they are written to the store later.
    """

    call_id: str
    name: str
    directory: str
    """Of the adapter's two files; the engine's from now on."""


class FlushAdapters(Message, frozen=True, kw_only=True):
    """Write to the store what was pushed. Answered by `AdaptersFlushed` when that is done."""

    call_id: str
    name: str | None = None
    """Only what this name means; None: everything."""


class PinAdapter(Message, frozen=True, kw_only=True):
    """Keep what a name means in memory, or no longer. Answered by `AdapterReply`."""

    call_id: str
    name: str
    pinned: bool


class DrainAdapter(Message, frozen=True, kw_only=True):
    """Give a name no new requests. Answered by `AdapterReply` when the store knows; requests that
    are open go on."""

    call_id: str
    name: str
    seconds: float
    """That open requests may still take before they are ended."""
    remove: bool
    """Whether the name goes when they have ended; else it stays until it is resumed."""


class ResumeAdapter(Message, frozen=True, kw_only=True):
    """Give a drained name requests again. Answered by `AdapterReply`."""

    call_id: str
    name: str


class PreloadAdapter(Message, frozen=True, kw_only=True):
    """Bring up what a name means. Answered by `AdapterReply` when it is there."""

    call_id: str
    name: str
    arena: bool = True
    """Whether into the arena; else to the hosts, if it is in neither."""


class UnloadAdapter(Message, frozen=True, kw_only=True):
    """Let a name mean nothing. Answered by `AdapterReply` when the store knows; requests that are
    open go on."""

    call_id: str
    name: str


NameCall = PinAdapter | DrainAdapter | ResumeAdapter | PreloadAdapter
"""What is done to a name and what it means stays."""
AdapterCall = (
    LoadAdapter
    | MoveAdapter
    | PushAdapter
    | FlushAdapters
    | NameCall
    | UnloadAdapter
    | ListAdapters
)


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
    durable: bool | None = None
    """After a push: whether the store has what the name means, so that it survives a kill."""
    requests: int = 0
    """Open requests of the name's revision."""


class AdaptersFlushed(Message, frozen=True, kw_only=True):
    """Answer to `FlushAdapters`."""

    call_id: str
    written: list[str]
    """Names whose meaning the store has now and had not."""
    failed: dict[str, str]
    """Names that could not be written, and why."""


AdapterState = Literal["fetching", "verifying", "ready", "draining", "failed"]
"""The front end knows of the first two; ``failed``: it is not served, though its name is known."""


class AdapterStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of an adapter now."""

    name: str
    state: AdapterState = "ready"
    reason: str = ""
    """Why it failed."""
    operation: str | None = None
    """The operation that loads it, or the last one that failed to."""
    revision: str = ""
    """SHA-256 of its canonical config and tensors, in hex; empty: not known yet."""
    source: str = ""
    """Directory or address that it came from."""
    max_rank: int = 0
    """The largest LoRA rank of any module."""
    modules: int = 0
    """Modules that it changes."""
    pages: int = 0
    """Arena pages that it takes on each rank when resident."""
    on_disk: bool = False
    """Whether the store has it."""
    warm: bool = False
    """Whether the hosts have it, on all ranks."""
    resident: bool = False
    """Whether it stands in the arena."""
    requests: int = 0
    """Open requests of its revision, under any name."""
    running: int = 0
    """Those of them that run; the others wait."""
    hits: int = 0
    """Requests that the name has had since the service began."""
    last_use: float | None = None
    """When it had the last one, in Unix seconds."""
    pinned: bool = False
    """Whether it is kept in memory when idle."""
    draining: bool = False
    """Whether it takes no new requests."""
    dirty: bool = False
    """Whether the store does not know yet what the name means: a kill would lose that."""
    write_error: str = ""
    """Why the last attempt to write it to the store failed."""
    history: list[str] = []
    """Revisions that the name meant, the present one first; of the store."""
    manifest: dict[str, Any] | None = None
    """Of the store, when it was asked for by name."""


class AdapterList(Message, frozen=True, kw_only=True):
    """Answer to `ListAdapters`."""

    call_id: str
    adapters: list[AdapterStatus]
    """In the order of their names."""


AdapterAnswer = AdapterReply | AdaptersFlushed | AdapterList
