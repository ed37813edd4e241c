"""Tile sizes of the one LoRA launch of steps of few rows, by the shape of a step: a fixed table.

Everything here is known on the host without looking at the device, so that a CUDA graph captured
for (rows, tiles, max_rank) can be replayed for every step that fits them.
"""

from dataclasses import dataclass

MULTIPROCESSORS = 132
"""Of an H100 or H200 SXM; how many programs keep the device busy."""
MANY_ROWS = 1024
"""Rows of a step from which x and y weigh more than the adapters: `prefill_plans` has its plans."""


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


__all__ = ["MANY_ROWS", "AddPlan", "plan_add"]
