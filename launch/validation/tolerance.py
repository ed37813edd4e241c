"""How far two computations of the same numbers may be apart, by dtype: the one table.

Shards of a row-parallel layer are summed over ranks, so the order of additions differs from that
of the unsharded layer, and each dtype rounds by its own step. What is compared are rows, one a
token: the norm of the difference over the norm of the reference. Rounding to 16 bits is carried on
and amplified from layer to layer, for a few tokens far more than for the rest, so the median row
of each sequence has a limit of its own: a wrong shard or adapter moves every row of a sequence.

Legend: T rows, W their width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Tolerance:
    """Limits of one dtype."""

    median: float
    """Error of the median row of a sequence: outputs of attention and MLP blocks, logits."""
    worst: float
    """Error of any row."""
    near_tie: float
    """Two best logits closer than this share of the logits' range are a near-tie: either may be
    the greedy token."""
    ties: float
    """Share of positions that may differ by near-ties (one position always may)."""


EXACT: Final = Tolerance(median=0.0, worst=0.0, near_tie=0.0, ties=0.0)
"""Where no reduction crosses ranks."""
TOLERANCES: Final = {
    "float32": Tolerance(median=2e-5, worst=2e-4, near_tie=1e-4, ties=0.01),
    "float16": Tolerance(median=1e-2, worst=2e-1, near_tie=1e-2, ties=0.1),
    "bfloat16": Tolerance(median=8e-2, worst=5e-1, near_tie=5e-2, ties=0.25),
}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RowErrors:
    """How far the rows of some sequences are from a reference."""

    errors: Tensor
    """[T], relative; NaN where either is not finite."""
    difference: Tensor
    """[T, W], absolute."""
    lengths: Sequence[int]
    """Rows of each sequence."""

    @property
    def largest(self) -> float:
        """The largest row error; infinite where one is not a number."""
        return float(self.errors.nan_to_num(torch.inf).max())

    def beyond(self, limit: Tolerance) -> tuple[int, int, int]:
        """Rows that are not within a limit: how many, the first, and its worst column."""
        bad = ~(self.errors <= limit.worst)
        parts = [torch.split(each, list(self.lengths)) for each in (self.errors, bad)]
        for errors, rows in zip(*parts, strict=True):
            rows |= ~(errors.median() <= limit.median)
        row = int(bad.int().argmax())
        return int(bad.count_nonzero()), row, int(self.difference[row].argmax())


def row_errors(found: Tensor, reference: Tensor, lengths: Sequence[int]) -> RowErrors:
    """Compare the rows [T, W] of sequences of some lengths with a reference."""
    difference = (found.double() - reference.double()).abs()
    norms = reference.double().norm(dim=1).clamp(min=torch.finfo(torch.float64).tiny)
    return RowErrors(errors=difference.norm(dim=1) / norms, difference=difference, lengths=lengths)
