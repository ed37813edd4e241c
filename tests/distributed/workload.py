"""What the ranks are asked to do, and what they answer: JSON both ways, no pickle.

The pytest process writes a list of `Case`; ``cases.py`` runs it under torchrun and rank 0 writes
one `Result` a line.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tp_engine.messages import TokenLogprobs
from tp_engine.params import SamplingParams


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One request."""

    prompt: list[int]
    params: SamplingParams
    model: str | None = None
    """Adapter name; None is the base."""


class Room(msgspec.Struct, frozen=True, kw_only=True):
    """How small to make the arena."""

    share: float | None = None
    """Of the pages that all requests and all adapters of a case would need at once."""
    adapters: int = 0
    """Without a share: room for so many of the largest adapter ..."""
    sequences: int = 0
    """... and so many of the longest request."""


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """A model, how to serve it, and what to ask."""

    name: str
    model: str
    """Directory."""
    rounds: list[list[Ask]]
    """Each is one batch, run to its end."""
    worlds: tuple[int, ...]
    """World sizes to run it at."""
    adapters: dict[str, str] = {}
    """Directories by name."""
    options: dict[str, Any] = {}
    """Fields of `EngineConfig`."""
    room: Room | None = None
    depth: int | None = None
    """Steps that may be under way at a time; without it, the engine's own choice."""
    checksums: bool = False
    """Report a checksum of every de-quantised weight."""
    aborted: list[Ask] = []
    """Before the rounds, start these, run `abort_after` steps and abort them all."""
    abort_after: int = 0


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The completion of one request."""

    tokens: list[int]
    finish_reason: str
    cached_tokens: int
    logprobs: list[TokenLogprobs] | None


class RankReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank says of itself after a case."""

    forward_calls: int
    norm_bytes: int
    """Of the weights that every rank holds whole."""
    weight_bytes: int
    """Of all other weights, as their storages are in memory."""
    checksums: dict[str, str]
    """SHA-256 of the rank's slice of each linear weight, de-quantised to float32."""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """All that came of a case."""

    name: str
    rounds: list[list[Answer]]
    counters: dict[str, float]
    """At the end."""
    gauges: dict[str, float]
    """At the end, when nothing is open."""
    gauges_running: dict[str, float]
    """With the requests that will be aborted still running."""
    gauges_aborted: dict[str, float]
    """Straight after they were aborted."""
    faults: list[str]
    """Of the page books."""
    pinned: int
    """References to adapters that should have been given back."""
    num_pages: int
    pages_at_once: int
    """What all requests and adapters would have needed at once; 0 where `Room` was not asked."""
    ranks: list[RankReport]
    seconds: float
