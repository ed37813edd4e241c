"""Seeds for requests that bring none."""

from __future__ import annotations

import random
import secrets
from collections.abc import Iterator


def seed_source(seed: int | None) -> Iterator[int]:
    """Seeds for requests that bring none; a fixed sequence when the engine has a seed."""
    draw = secrets.randbelow if seed is None else random.Random(seed).randrange
    while True:
        yield draw(2**63)
