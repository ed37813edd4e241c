"""How the NF4 product for few rows is cut up, and what shared memory that takes."""

from dataclasses import dataclass

from kernels.nf4.lookup import LUT_BYTES
from kernels.nf4.packed_weight import BLOCK
from kernels.sizes import HOPPER_ROOM, power_of_two

MOST_ROWS = 16
"""Rows of x that a program can hold."""
_UNASKED = 48 << 10  # bytes it has without asking; Triton asks when its own part alone is more


@dataclass(frozen=True, kw_only=True, slots=True)
class FewConfig:
    """How one product of few rows is cut up."""

    tiles: int
    """Tiles of 16 output features a program has at a time; 1, 2, 4 or 8."""
    pairs: int
    """Pairs of 64-column blocks of a warp's step."""
    warps: int
    """Warps a program, which share the columns: 4, 8 or 16."""
    split: int
    """Programs that share the columns of one output."""
    programs: int
    """At most so many programs, a multiple of `split`: what the device holds at a time."""

    def __post_init__(self) -> None:
        if self.tiles not in (1, 2, 4, 8):
            raise ValueError(f"tiles must be 1, 2, 4 or 8, got {self.tiles}")
        if self.warps not in (4, 8, 16):
            raise ValueError(f"warps must be 4, 8 or 16, got {self.warps}")
        if self.split < 1 or self.programs < self.split or self.programs % self.split:
            raise ValueError(
                f"programs must be a multiple of split, got {self.programs} and {self.split}"
            )

    def steps(self, blocks: int) -> int:
        """Steps of one part of `blocks` blocks."""
        part = -(-(blocks // 2) // self.split)
        return -(-part // (self.warps * self.pairs))

    def buffers(self, rows: int, blocks: int) -> int:
        """Places for steps of x to keep, or 0 when they don't fit.

        More than there are steps where Triton would otherwise not ask for what the table and its
        own part need together.
        """
        step = self._step_bytes(rows)
        needed = self.steps(blocks) * step
        if rows > MOST_ROWS or needed + self._others(rows) > HOPPER_ROOM:
            return 0
        if needed + self._others(rows) > _UNASKED:
            needed = max(needed, _UNASKED)
        return -(-needed // step)

    def shared(self, rows: int, blocks: int) -> int:
        """Bytes of shared memory a program, or 0 when there is no place for x."""
        buffers = self.buffers(rows, blocks)
        return buffers and buffers * self._step_bytes(rows) + self._others(rows)

    def _others(self, rows: int) -> int:
        """Bytes of the table, the sums of warps and what Triton takes to reorder a step."""
        return LUT_BYTES + self.warps * self.tiles * 512 + self._step_bytes(rows)

    def _step_bytes(self, rows: int) -> int:
        return self.warps * self.pairs * 2 * BLOCK * power_of_two(rows) * 2


__all__ = ["MOST_ROWS", "FewConfig"]
