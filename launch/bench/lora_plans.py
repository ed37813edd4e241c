"""Tile sizes that the LoRA benchmark tries."""

from __future__ import annotations

from kernels.lora.plans import AddPlan
from kernels.lora.prefill_plans import PrefillExpandPlan, PrefillShrinkPlan


def add_plans(rows: int, width: int) -> list[AddPlan]:
    """Tile sizes of steps of few rows, for `width` in-features."""
    if rows == 1:
        return [
            AddPlan(
                block_k=k,
                shrink_steps=1,
                blocks=blocks,
                expand_steps=steps,
                programs=4096,
                registers=255,
            )
            for k in (128, 256)
            for blocks, steps in ((1, 1), (1, 2), (2, 1))
        ]
    return [
        AddPlan(
            block_k=128,
            shrink_steps=-(-width // (128 * parts)),
            blocks=blocks,
            expand_steps=steps,
            programs=programs,
            registers=registers,
        )
        for parts in (4, 8, 16)
        for blocks, steps, registers in ((1, 1, 128), (1, 4, 128), (2, 2, 168), (2, 4, 168))
        for programs in (1056, 2112, 4224)
    ]


def shrink_plans() -> list[PrefillShrinkPlan]:
    """Tile sizes of the first half of steps of many rows."""
    return [
        PrefillShrinkPlan(
            block_rows=64, block_ranks=r, block_k=k, parts=parts, warps=4, stages=stages
        )
        for r in (16, 32, 64)
        for k, stages in ((64, 4), (64, 6), (128, 4))
        for parts in (1, 2, 4)
    ]


def expand_plans() -> list[PrefillExpandPlan]:
    """Tile sizes of the second half of steps of many rows."""
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


__all__ = ["add_plans", "expand_plans", "shrink_plans"]
