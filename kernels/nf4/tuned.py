"""Measured configurations: written by `python -m launch.bench.tune_nf4 --table`."""

from typing import Any

TUNED: tuple[tuple[int, tuple[int, int], dict[str, Any]], ...] = (
    (8, (4096, 4096), {"tiles": 1, "rows": 8, "blocks": 2, "ways": 4, "warps": 4, "stages": 4}),
)
"""(rows, (features, columns), fields of GemmConfig)."""
