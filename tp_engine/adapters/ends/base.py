"""The base's own embedding and LM head, as its files have them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from sharding import Checkpoint, Span
from tp_engine.adapters.targets import VOCAB_MODULES

_ROWS: Final = 4096
"""Compared at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseFiles:
    """See `tp_engine.adapters.ends.reader.BaseEnds`."""

    directory: Path
    tied: bool
    """Whether the head is the embedding."""

    def holds(self, end: int, matrix: Tensor) -> bool:
        """Whether an end of the base is ``matrix``, number by number, whatever their dtypes.

        Raises:
            CheckpointError: the files cannot be read.
        """
        name = f"{VOCAB_MODULES[0 if self.tied else end]}.weight"
        with Checkpoint.open(self.directory) as checkpoint:
            if name not in checkpoint or checkpoint.shape(name) != tuple(matrix.shape):
                return False
            if not checkpoint.dtype(name).is_floating_point:
                return False
            for start in range(0, matrix.shape[0], _ROWS):
                rows = Span(start, min(start + _ROWS, matrix.shape[0]))
                part = checkpoint.read_slice(name, rows)
                if not torch.equal(part.float(), matrix[rows.slice].float()):
                    return False
        return True
