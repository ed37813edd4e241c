"""Sizes of captured steps: a step is padded to the first one that holds it.

    rows        | one each of the decodes | of the prompts | of no sequence |
    sequences   | decodes | without rows  | prompts | without rows          |

In a shape for decode steps there are no prompts, and all sequences have a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kernels.lora.tiles import TILE_ROWS

MIXED_ROWS = (64, 128, 192, 256, 384, 512, 640, 768, 896, 1024)
"""Rows of steps with prompts. Beyond, the device takes longer than the host to launch them."""
PROMPT_ROWS = 16
"""Mean rows of the prompts of a step, at least; more and shorter ones take a larger shape."""
MIN_PROMPTS = 4


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a captured step has room for."""

    rows: int
    decodes: int
    """Leading sequences of at most one row."""
    prompts: int = 0
    """Further sequences."""

    @property
    def sequences(self) -> int:
        """Sequences, and segments of adapters."""
        return self.decodes + self.prompts

    @property
    def logits(self) -> int:
        """Rows with logits, one at least."""
        return max(1, self.decodes)

    @property
    def tiles(self) -> int:
        """Tiles of rows that segments can be cut into."""
        return min(self.rows, self.rows // TILE_ROWS + self.sequences)

    @property
    def max_query(self) -> int:
        """Most rows of a sequence."""
        return self.rows if self.prompts else 1


def decode_shapes(max_num_seqs: int) -> Iterator[StepShape]:
    """Shapes of decode steps, ascending, the last one for ``max_num_seqs`` sequences."""
    for size in batch_sizes(max_num_seqs):
        yield StepShape(rows=size, decodes=size)


def mixed_shapes(max_num_seqs: int, max_rows: int) -> Iterator[StepShape]:
    """Shapes of steps with prompts, ascending, none larger than what can come."""
    last = min(max_rows, MIXED_ROWS[-1])
    for rows in (*(size for size in MIXED_ROWS if size < last), last):
        prompts = max(MIN_PROMPTS, rows // PROMPT_ROWS)
        yield StepShape(rows, min(rows, max_num_seqs), min(prompts, max_num_seqs))


def batch_sizes(max_num_seqs: int) -> list[int]:
    """Sizes to capture, ascending, the last one at least ``max_num_seqs``."""
    sizes = [size for size in (1, 2, 4, 8, 16, 24, 32) if size < max_num_seqs]
    sizes += range(48, max_num_seqs, 16) if max_num_seqs <= 128 else range(64, max_num_seqs, 32)
    return [*sizes, max_num_seqs]


__all__ = ["StepShape", "batch_sizes", "decode_shapes", "mixed_shapes"]
