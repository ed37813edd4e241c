"""Tile sizes that the LoRA benchmark tries."""

from __future__ import annotations

from kernels.lora.plans import MANY_ROWS, ExpandPlan, ShrinkPlan


def shrink_plans(rows: int, longest: int) -> list[ShrinkPlan]:
    """Tile sizes worth trying."""
    if rows >= MANY_ROWS:
        return [
            ShrinkPlan(
                block_rows=m,
                block_ranks=64,
                block_k=k,
                steps=4096 // k // parts,
                dot=True,
                warps=w,
                stages=s,
            )
            for m, k, parts, w, s in (
                (64, 64, 1, 4, 4),
                (64, 64, 2, 4, 4),
                (64, 64, 4, 4, 3),
                (64, 128, 2, 4, 3),
                (32, 128, 1, 4, 4),
                (32, 64, 2, 4, 4),
                (128, 64, 2, 8, 4),
                (128, 64, 4, 8, 3),
            )
        ]
    sums = [
        ShrinkPlan(block_rows=m, block_ranks=16, block_k=k, steps=1, dot=False, warps=w)
        for m in _tiles(longest)
        for k, w in ((256, 4), (512, 4), (1024, 4), (1024, 8))
    ]
    dots = [
        ShrinkPlan(block_rows=16, block_ranks=r, block_k=k, steps=1, dot=True, warps=w)
        for r, k, w in ((16, 256, 4), (16, 512, 4), (32, 512, 8), (16, 1024, 8))
    ]
    return sums + dots


def _tiles(longest: int) -> tuple[int, ...]:
    """Rows of an adapter that share a reading of its rank-rows."""
    return (4,) if longest <= 4 else (4, 8)


def expand_plans(rows: int, longest: int) -> list[ExpandPlan]:
    """Tile sizes worth trying."""
    if rows >= MANY_ROWS:
        shapes = [
            (64, 128, 4, 1),
            (64, 128, 4, 4),
            (64, 64, 4, 1),
            (64, 64, 4, 4),
            (64, 256, 8, 1),
            (32, 128, 4, 1),
            (128, 64, 4, 1),
            (128, 128, 8, 1),
        ]
    else:
        shapes = [(16, 256, 4, 1), (16, 256, 4, 4), (16, 512, 8, 1)]
    dots = [
        ExpandPlan(
            block_rows=m, block_columns=n, block_ranks=16, dot=True, warps=w, column_tiles=tiles
        )
        for m, n, w, tiles in shapes
    ]
    sums = [
        ExpandPlan(
            block_rows=m, block_columns=n, block_ranks=16, dot=False, warps=w, column_tiles=tiles
        )
        for m in _tiles(longest)
        for n, w, tiles in ((256, 4, 1), (256, 4, 4), (512, 4, 1), (512, 4, 4), (1024, 8, 1))
    ]
    return dots if rows >= MANY_ROWS else sums + dots


__all__ = ["expand_plans", "shrink_plans"]
