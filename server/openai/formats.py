"""What the two APIs have in common in laying out answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec
from msgspec import UnsetType

from server.openai.generation import Delta
from server.openai.shapes import Usage


class Format(Protocol):
    """Lays out the answers of one request; ``revision`` is the SHA-256 of what answers it."""

    def whole(
        self, outputs: Sequence[Delta], usage: Usage, *, revision: str | None
    ) -> msgspec.Struct:
        """The answer in one piece; ``outputs`` are whole, in index order."""

    def chunks(
        self, delta: Delta, usage: Usage | UnsetType | None, *, first: bool, revision: str | None
    ) -> list[msgspec.Struct]:
        """Stream events for ``delta``, ``first`` of its index, with this ``usage``."""

    def usage_chunk(self, usage: Usage, *, revision: str | None) -> msgspec.Struct:
        """The stream event that ends a stream whose client asked for usage."""
