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
    dots = [
        ShrinkPlan(block_rows=m, block_ranks=r, block_k=k, steps=1, dot=True, warps=w)
        for m, r, k, w in (
            (16, 16, 256, 2),
            (16, 16, 256, 4),
            (16, 16, 512, 4),
            (16, 32, 256, 4),
            (16, 16, 1024, 8),
            (32, 16, 256, 4),
        )
    ]
    few = 1 << min(2, max(0, longest - 1).bit_length())
    sums = [
        ShrinkPlan(block_rows=few, block_ranks=r, block_k=k, steps=1, dot=False, warps=w)
        for r, k, w in ((16, 256, 2), (16, 512, 4), (16, 1024, 4), (16, 1024, 8), (8, 1024, 4))
    ]
    return dots + sums


def expand_plans(rows: int, longest: int) -> list[ExpandPlan]:
    """Tile sizes worth trying."""
    if rows >= MANY_ROWS:
        shapes = [
            (64, 128, 4),
            (64, 256, 8),
            (64, 64, 4),
            (32, 256, 4),
            (128, 128, 8),
            (32, 128, 4),
        ]
    else:
        shapes = [(16, 128, 2), (16, 128, 4), (16, 256, 4), (16, 512, 4), (32, 256, 4)]
    dots = [
        ExpandPlan(block_rows=m, block_columns=n, block_ranks=16, dot=True, warps=w)
        for m, n, w in shapes
    ]
    few = 1 << min(2, max(0, longest - 1).bit_length())
    sums = [
        ExpandPlan(block_rows=few, block_columns=n, block_ranks=r, dot=False, warps=w)
        for n, r, w in ((256, 16, 2), (512, 16, 4), (1024, 16, 4), (1024, 16, 8), (256, 32, 4))
    ]
    return dots if rows >= MANY_ROWS else dots + sums


__all__ = ["expand_plans", "shrink_plans"]
