"""Tile sizes that the LoRA benchmark tries."""

from __future__ import annotations

from kernels.lora.plans import MANY_ROWS, ExpandPlan, ShrinkPlan
from kernels.lora.prefill_plans import PrefillExpandPlan, PrefillShrinkPlan


def shrink_plans(rows: int, longest: int) -> list[ShrinkPlan | PrefillShrinkPlan]:
    """Tile sizes worth trying."""
    if rows >= MANY_ROWS:
        return [
            PrefillShrinkPlan(
                block_rows=64, block_ranks=r, block_k=k, parts=parts, warps=4, stages=stages
            )
            for r in (16, 32, 64)
            for k, stages in ((64, 4), (64, 6), (128, 4))
            for parts in (1, 2, 4)
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
    return [*sums, *dots]


def _tiles(longest: int) -> tuple[int, ...]:
    """Rows of an adapter that share a reading of its rank-rows."""
    return (4,) if longest <= 4 else (4, 8)


def expand_plans(rows: int, longest: int) -> list[ExpandPlan | PrefillExpandPlan]:
    """Tile sizes worth trying."""
    if rows >= MANY_ROWS:
        return [
            PrefillExpandPlan(
                block_rows=64,
                block_columns=n,
                block_ranks=16,
                columns=chunk,
                warps=4,
                stages=stages,
            )
            for n, stages in ((64, 3), (64, 4), (128, 2), (128, 3))
            for chunk in (512, 1024, 2048)
        ]
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
    return [*sums, *dots]


__all__ = ["expand_plans", "shrink_plans"]
