"""What the parts of the attention benchmark share."""

from __future__ import annotations

from collections.abc import Sequence

from launch.bench.graphs import Call, graph_us

BEYOND_L2 = 256 * 2**20
"""Bytes that a graph reads at least before it reads the same again."""
DEVICE = "cuda"


def peer_us(calls: Sequence[Call]) -> float | str:
    """`graph_us` of what may not run here (another library's op, a tile), or why it doesn't."""
    try:
        return graph_us(calls)
    except Exception as error:  # whatever another library raises is its result here
        return f"{type(error).__name__}: {str(error)[:200]}"
