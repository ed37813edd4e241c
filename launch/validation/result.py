"""What the checks found, for people and for machines."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(kw_only=True, slots=True)
class Check:
    """One line of the report."""

    name: str
    tensors: int = 0
    elements: int = 0
    """Compared, over all ranks."""
    mismatches: int = 0
    error: float = 0.0
    """Largest difference: of tensors that must be equal, absolute; of outputs, relative."""
    seconds: float = 0.0
    """On the rank that took longest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mismatch:
    """One tensor that is not what it must be."""

    check: str
    tensor: str
    rank: int | None
    """None: of all ranks together."""
    index: str
    """First differing element, in unsharded coordinates."""
    detail: str

    def __str__(self) -> str:
        place = "over all ranks" if self.rank is None else f"on rank {self.rank}"
        return f"{self.tensor} ({self.check}) {place}: first at {self.index}, {self.detail}"


@dataclass(kw_only=True, slots=True)
class Result:
    """Of one or several checks."""

    checks: list[Check] = field(default_factory=list)
    mismatches: list[Mismatch] = field(default_factory=list)

    def add(self, other: Result) -> None:
        """Take over another's findings."""
        self.checks += other.checks
        self.mismatches += other.mismatches
