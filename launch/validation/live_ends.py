"""What a rank computes with at the model's two ends, found as its layers find it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from launch.validation.live import Cell, LiveError, cell_of
from sharding import Span
from tp_engine.adapters.layout import EndRole
from tp_engine.layers import ArenaMatrix, TokenRows
from tp_engine.tiers.resident_ends import ResidentEnds


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveEnd:
    """One end of one resident adapter."""

    resident: ResidentEnds
    descriptor: int
    """Where the adapter's record begins."""
    end: int

    def change(self) -> TokenRows:
        """What the adapter changes there.

        Raises:
            LiveError: nothing, as the rank sees it.
        """
        found = self.resident.changes(self.descriptor).get(self.end)
        if found is None:
            raise LiveError("the rank knows of no change there")
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class EndMatrix:
    """One of its matrices."""

    of: LiveEnd
    role: EndRole
    rows: int
    """On this rank."""
    columns: int
    dtype: torch.dtype

    def read(self, rows: Span) -> Tensor:
        """[n, columns], gathered from the arena."""
        if not rows.size:
            return torch.empty(0, self.columns, dtype=self.dtype)
        matrix = self._matrix()
        return matrix.pick(torch.arange(rows.start, rows.stop, device=matrix.starts.device)).cpu()

    def cell(self, row: int, col: int) -> Cell:
        """In the arena."""
        matrix = self._matrix()
        chunk, place = divmod(row, matrix.chunk_rows)
        element = int(matrix.starts[chunk]) + place * matrix.columns + col
        return cell_of(matrix.values, element)

    def _matrix(self) -> ArenaMatrix:
        role = "replaced" if self.role == "rows" else self.role
        matrix: ArenaMatrix | None = getattr(self.of.change(), role)
        if matrix is None or (matrix.rows, matrix.columns) != (self.rows, self.columns):
            found = "nothing" if matrix is None else [matrix.rows, matrix.columns]
            raise LiveError(f"the rank has {found}, need {[self.rows, self.columns]}")
        return matrix


@dataclass(frozen=True, kw_only=True, slots=True)
class EndIds:
    """The tokens whose rows are replaced, as numbers of the whole vocabulary."""

    of: LiveEnd
    first: int
    """The rank's first token."""
    count: int
    """Of those that the rank holds."""

    def read(self, rows: Span) -> Tensor:
        """int64 [n, 1]."""
        if not rows.size:
            return torch.empty(0, 1, dtype=torch.int64)
        return (self._ids()[rows.slice] + self.first)[:, None].cpu()

    def cell(self, row: int, col: int) -> Cell:
        """Where the layers read it."""
        return cell_of(self._ids(), row)

    def _ids(self) -> Tensor:
        ids = self.of.change().ids
        if ids is None or ids.numel() != self.count:
            raise LiveError(f"the rank has {0 if ids is None else ids.numel()}, need {self.count}")
        return ids


@dataclass(frozen=True, kw_only=True, slots=True)
class EndScale:
    """The factor of an end's LoRA product."""

    of: LiveEnd

    def read(self, rows: Span) -> Tensor:
        """float64 [1, 1]."""
        return torch.tensor([[self.of.change().scale]], dtype=torch.float64)

    def cell(self, row: int, col: int) -> None:
        """Not to be had: it is a number of the host's."""
