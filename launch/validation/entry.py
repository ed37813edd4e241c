"""One tensor to compare: what the rank holds beside what the file says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from torch import Tensor

from launch.validation.live import Live
from sharding import Span, WeightSlice

TOP = -1
"""As an entry's layer: it belongs to none."""


class Kind(StrEnum):
    """What sort of tensor it is, as the report names it."""

    EMBEDDING = "embedding"
    HEAD = "LM head"
    NORM = "norms"
    BIAS = "biases"
    DENSE = "dense weights"
    CODES = "NF4 codes"
    ABSMAX = "NF4 absmax"
    PHASE = "NF4 phases"
    COPY = "NF4 dense copies"
    LORA_A = "LoRA A rows"
    LORA_B = "LoRA B rows"
    SCALE = "LoRA scales"
    RANK = "LoRA ranks"
    GAIN = "LoRA gains"
    LORA_BIAS = "LoRA biases"
    TOKEN_ROWS = "LoRA rows of embedding and LM head"
    REPLACED = "replaced rows of embedding and LM head"
    REPLACED_IDS = "replaced tokens"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Entry:
    """One logical tensor on one rank. All ranks list the same entries in the same order."""

    name: str
    """Of the tensor in the checkpoint; an adapter's begin with the adapter's name."""
    kind: Kind
    layer: int
    """Or `TOP`."""
    shape: tuple[int, int]
    """Of the unsharded tensor; a vector is [N, 1]."""
    part: WeightSlice
    """What this rank must hold of it, in unsharded indices."""
    live: Live
    whole: Callable[[Span], Tensor]
    """Unsharded rows, all columns, from the files."""
    vector: bool = False
    """Indices are reported without the column."""
    block: int = 1
    """Neighbours in flattened order that share one live value (absmax)."""
    ulps: int = 0
    """By how many units in the last place a float32 element may differ; 0: not by a bit."""

    def index(self, row: int, col: int) -> str:
        """An unsharded index as people read it."""
        return f"[{row}]" if self.vector else f"[{row}, {col}]"
