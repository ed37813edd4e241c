"""Tile sizes of the LoRA kernels for steps of many rows: a fixed table, measured on an H200.

Steps of fewer rows whose tiles are not known take them too.
"""

from dataclasses import dataclass

import torch

from kernels.lora.plans import MANY_ROWS
from kernels.sizes import power_of_two

SPLIT_ROWS = 4096
"""Fewer rows make too few tiles for the device: sums over in-features are then split."""
MOST_RANKS = 128
"""The largest rank that is one product in an expand; a larger one takes turns."""
MAX_FUSED = 64
"""The largest rank for which the activation takes in the deltas of its input."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillShrinkPlan:
    """One launch of `prefill_shrink_kernel`. All blocks are powers of two."""

    block_rows: int
    """Rows a program."""
    block_ranks: int
    """Rank-rows a program, of all the launch's sites; at least 16."""
    block_k: int
    """In-features a step; at least 16."""
    parts: int
    """Most programs that share a sum over the in-features."""
    warps: int
    stages: int
    """Steps of which data are in flight or in use."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillExpandPlan:
    """One launch of `prefill_expand_kernel` or `prefill_silu_kernel`.

    All blocks are powers of two.
    """

    block_rows: int
    """Rows a program; a multiple of 16 * warps."""
    block_columns: int
    """Out-features a step; at least 32."""
    block_ranks: int
    """Rank-rows a product; at least 16."""
    columns: int
    """Most out-features a program; a power of two."""
    warps: int
    stages: int
    """Steps of which data are in flight or in use."""


def plan_shrink(
    rows: int, sites: int, max_rank: int, width: int, dtype: torch.dtype
) -> PrefillShrinkPlan:
    """Return the plan for x [rows, width] and a launch of `sites` sites."""
    size = max(2, dtype.itemsize)
    rank_rows = max(16, power_of_two(sites * max_rank))
    # Of high ranks several blocks: programs for which an adapter has no rank-row end at once.
    block_ranks = min(64 if max_rank <= 16 else 32, rank_rows)
    block_k = min((128 if block_ranks == 64 else 256) // size, max(16, power_of_two(width)))
    return PrefillShrinkPlan(
        block_rows=64,
        block_ranks=block_ranks,
        block_k=block_k,
        parts=-(-SPLIT_ROWS // max(MANY_ROWS, rows)),
        warps=4,
        stages=2 if size > 2 else 6 if block_ranks == 64 else 4,
    )


def plan_expand(rows: int, max_rank: int, width: int, dtype: torch.dtype) -> PrefillExpandPlan:
    """Return the plan for y [rows, ..], the widest site of the launch having `width` columns."""
    size = max(2, dtype.itemsize)
    once = max_rank <= (MOST_RANKS if size == 2 else 16)
    block = 32 if size > 2 else 128 if max_rank <= 64 else 64
    few = rows < SPLIT_ROWS and max_rank <= 16  # more programs then do better than more stages
    return PrefillExpandPlan(
        block_rows=64,
        block_columns=min(block, max(32, power_of_two(width))),
        block_ranks=max(16, power_of_two(max_rank)) if once else 16,
        columns=min(2048 // size, max(32, power_of_two(width))),
        warps=4,
        stages=3 if once and size == 2 and not few else 1,
    )


def plan_silu(max_rank: int) -> PrefillExpandPlan:
    """Return the plan for a rank of up to `MAX_FUSED` and values of 16 bits."""
    return PrefillExpandPlan(
        block_rows=64,
        block_columns=64 if max_rank <= 16 else 32,
        block_ranks=max(16, power_of_two(max_rank)),
        columns=1024,
        warps=4,
        stages=3,
    )


__all__ = [
    "MAX_FUSED",
    "PrefillExpandPlan",
    "PrefillShrinkPlan",
    "plan_expand",
    "plan_shrink",
    "plan_silu",
]
