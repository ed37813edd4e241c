"""What a soak does, and for how long."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class SoakOptions:
    """One soak; the same options make the same choices, in an order that the clock decides."""

    seconds: float
    """Of traffic; start, registration and comparison come on top."""
    ranks: int = 2
    """World size, under torchrun, over gloo."""
    adapters: int = 300
    """Names in use."""
    spare: int = 100
    """Adapters on disk beyond one a name, for replacements."""
    resident: int = 20
    """Average adapters that the arena has room for, beside the requests' keys and values."""
    host_memory: str = "16MiB"
    """Of a rank, for adapters: less than all of them take, so that some must be read again."""
    clients: int = 16
    """Requests open at a time."""
    operators: int = 2
    """Control-plane calls open at a time."""
    pause: float = 0.4
    """Mean seconds that an operator waits between calls."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("seconds", "ranks", "adapters", "resident", "clients", "operators"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)} is not allowed: above 0")
        for name in ("spare", "pause"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} is not allowed: at least 0")
