"""Tile sizes of the LoRA kernels by the shape of a step: a fixed table.

Chosen from bytes and registers; `SUM_ROWS`, `SHARED_ROWS` and the tiles up to there were compared
in whole decode steps on an H200, the others have not been timed.

Everything here is known on the host without looking at the device, so that a CUDA graph captured
for (rows, segments, max_rows, max_rank) can be replayed for every step that fits them.
"""

from dataclasses import dataclass

import torch

from kernels.lora import LoraSegments
from kernels.sizes import power_of_two

MULTIPROCESSORS = 132
"""Of an H100 or H200 SXM; how many programs keep the device busy."""
SUM_ROWS = 256
"""Rows of a step up to which products are sums without tensor cores: rank-rows then go from memory
to the registers of the threads that use them, a row of x or y after the other."""
SUM_TILE = 4
"""Rows of an adapter that share a reading of its rank-rows in such a step."""
SHARED_ROWS = 16
"""Rows of one adapter from which tensor cores pay in such a step: a tile of rows is then filled."""
MANY_ROWS = 1024
"""Rows of a step from which x and y weigh more than the adapters: `prefill_plans` has its plans."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShrinkPlan:
    """One launch of `shrink_kernel`. All blocks are powers of two."""

    block_rows: int
    """Rows a program."""
    block_ranks: int
    """Rank-rows a program, of all the launch's sites; at least 16 with `dot`."""
    block_k: int
    """In-features a program; at least 16 with `dot`."""
    dot: bool
    """Tensor cores."""
    warps: int

    def parts(self, width: int) -> int:
        """Return how many programs share a sum over `width` in-features, at least 1."""
        return max(1, -(-width // self.block_k))


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpandPlan:
    """One launch of `expand_kernel`. All blocks are powers of two."""

    block_rows: int
    """Rows a program."""
    block_columns: int
    """Out-features a program."""
    block_ranks: int
    """Rank-rows a turn of the loop over an adapter's own rank; at least 16 with `dot`."""
    dot: bool
    """Tensor cores."""
    warps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class AddPlan:
    """One launch of `add_kernel`."""

    block_k: int
    """In-features of a step: a multiple of 32."""
    shrink_steps: int
    """Steps of a part of the sum over in-features."""
    blocks: int
    """Blocks of 64 out-features of a step: a power of two."""
    expand_steps: int
    """Steps of an expanding program."""
    programs: int
    """Most programs of either kind; beyond it they take several items one after the other."""
    registers: int
    """Most registers a thread."""

    @property
    def columns(self) -> int:
        """Out-features of an item."""
        return 64 * self.blocks * self.expand_steps

    def parts(self, width: int) -> int:
        """Return how many programs share a sum over `width` in-features, at least 1."""
        return max(1, -(-width // (self.shrink_steps * self.block_k)))


def plan_add(rows: int, width: int, max_rank: int) -> AddPlan:
    """Return the plan for x [rows, width]: the best of those compared on an H200."""
    if rows == 1:
        return AddPlan(
            block_k=256, shrink_steps=1, blocks=2, expand_steps=1, programs=4096, registers=255
        )
    parts = 8 if width <= 8192 else 16
    many = max_rank > 16  # rank-rows than fit a product at a time
    return AddPlan(
        block_k=128,
        shrink_steps=max(1, -(-width // (128 * parts))),
        blocks=2,
        expand_steps=2 if many or rows <= 64 else 4,
        programs=MULTIPROCESSORS * 16,
        registers=255 if many else 168,
    )


def plan_shrink(
    rows: int, segments: LoraSegments, sites: int, width: int, dtype: torch.dtype
) -> ShrinkPlan:
    """Return the plan for x [rows, width] and a launch of `sites` sites."""
    longest = segments.longest(rows)
    size = max(2, dtype.itemsize)
    wide = width > 8192  # twice the in-features a program, for half the parts
    block_k = min((2048 if wide else 1024) // size, max(16, power_of_two(width)))
    warps = 8 if wide else 4
    if _sums(rows, longest):
        return ShrinkPlan(
            block_rows=power_of_two(min(longest, SUM_TILE)),
            block_ranks=16,
            block_k=block_k,
            dot=False,
            warps=warps,
        )
    return ShrinkPlan(block_rows=16, block_ranks=16, block_k=block_k, dot=True, warps=warps)


def plan_expand(rows: int, segments: LoraSegments, width: int, dtype: torch.dtype) -> ExpandPlan:
    """Return the plan for y [rows, ...], the widest site of the launch having `width` columns."""
    longest = segments.longest(rows)
    size = max(2, dtype.itemsize)
    sums = _sums(rows, longest)
    return ExpandPlan(
        block_rows=power_of_two(min(longest, SUM_TILE)) if sums else 16,
        block_columns=min(
            (1024 if rows <= SUM_ROWS else 512) // size, max(16, power_of_two(width))
        ),
        block_ranks=16,
        dot=not sums,
        warps=4,
    )


def _sums(rows: int, longest: int) -> bool:
    """Whether products are sums without tensor cores."""
    return rows <= SUM_ROWS and longest < SHARED_ROWS


__all__ = [
    "MANY_ROWS",
    "AddPlan",
    "ExpandPlan",
    "ShrinkPlan",
    "plan_add",
    "plan_expand",
    "plan_shrink",
]
