"""What is known of a revision without its tensors, of which there may be thousands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, Self


class KnownRevision(Protocol):
    """What the registry asks of a revision: that of a card."""

    @property
    def digest(self) -> str:
        """Its identity."""

    @property
    def source(self) -> str:
        """Where it was read from."""

    @property
    def applied(self) -> int:
        """Modules that are applied."""

    @property
    def expected(self) -> int:
        """Modules that its config targets."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the operator should know although it is valid."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RevisionCard:
    """A revision without its tensors."""

    digest: str
    source: str
    applied: int
    expected: int
    warnings: tuple[str, ...]

    @classmethod
    def of(cls, revision: KnownRevision) -> Self:
        """The card of a revision, which keeps none of its memory; a card is its own."""
        if isinstance(revision, cls):
            return revision
        return cls(
            digest=revision.digest,
            source=revision.source,
            applied=revision.applied,
            expected=revision.expected,
            warnings=revision.warnings,
        )
