"""An adapter's rank-rows in the arena, found as the kernels find them: through its live record.

Legend: r LoRA rank of a module, L layers, S sites; words of a record as in `kernels.lora`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from launch.validation.live import Cell, LiveError, bits_of, cell_of
from sharding import SITES, Span
from tp_engine.steps.runner import Arena

_RANK_BITS = 16


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LiveRecord:
    """The descriptor record of one resident adapter."""

    arena: Arena
    descriptor: int
    """Where it begins in the arena's descriptors."""
    layers: int

    def head(self, layer: int, site: int) -> int:
        """Index of a module's first word in the descriptors; its scale follows."""
        return self.descriptor + 2 * (layer * len(SITES) + site)

    def offsets(self, layer: int, site: int, side: Literal["A", "B"], rank: int) -> Tensor:
        """int64 [r]: the bytes where the rows of A, or the columns of B, begin in the arena.

        Raises:
            LiveError: the record says another rank, or points out of the descriptors.
        """
        first = rank if side == "B" else 0
        return self._words(layer, site, rank)[first : first + rank]

    def affine_offsets(self, layer: int, site: int, rank: int) -> tuple[int, int]:
        """The bytes where the gain row and the bias row begin in the arena; -1: there is none.

        Raises:
            LiveError: as `offsets`.
        """
        gain, bias = self._words(layer, site, rank)[2 * rank :].tolist()
        return gain, bias

    def _words(self, layer: int, site: int, rank: int) -> Tensor:
        """int64 [2 r + 2], a module's offsets."""
        words = self.arena.descriptors
        word = int(words[self.head(layer, site)])
        first, live_rank = word >> _RANK_BITS, word & ((1 << _RANK_BITS) - 1)
        if live_rank != rank:
            raise LiveError(f"its record says LoRA rank {live_rank} instead of {rank}")
        start, count = self.descriptor + first, 2 * rank + 2
        if first < 0 or start + count > words.numel():
            raise LiveError(f"its record leads to word {start} of {words.numel()}")
        return words[start : start + count]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RankRows:
    """A [r, in] or B [out, r] of one module, as its rank-rows [r, width] in the arena."""

    record: LiveRecord
    layer: int
    site: int
    side: Literal["A", "B"]
    rank: int
    """r."""
    width: int
    """Elements of a rank-row on this rank."""
    dtype: torch.dtype

    def read(self, rows: Span) -> Tensor:
        """Rows of A, or rows of B: the same element of every rank-row."""
        if self.side == "A":
            return self._gather(self._offsets()[rows.slice], Span(0, self.width))
        return self._gather(self._offsets(), rows).T

    def cell(self, row: int, col: int) -> Cell:
        """In the arena."""
        which, element = (row, col) if self.side == "A" else (col, row)
        at = int(self._offsets()[which]) + element * self.dtype.itemsize
        return Cell(bits=bits_of(self.record.arena.memory, 8 * at, 8 * self.dtype.itemsize))

    def _offsets(self) -> Tensor:
        offsets = self.record.offsets(self.layer, self.site, self.side, self.rank)
        last = self.record.arena.memory.numel() - self.width * self.dtype.itemsize
        if int(offsets.min()) < 0 or int(offsets.max()) > last:
            raise LiveError(f"its record has offsets out of the arena: {offsets.tolist()}")
        return offsets

    def _gather(self, offsets: Tensor, part: Span) -> Tensor:
        """Elements ``part`` of the rank-rows that begin at ``offsets``."""
        size = self.dtype.itemsize
        byte = torch.arange(part.start * size, part.stop * size, device=offsets.device)
        raw = self.record.arena.memory[offsets[:, None] + byte].cpu()
        return raw.view(self.dtype).view(len(offsets), part.size)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Heads:
    """What the record says of every module: LoRA ranks, or scales."""

    record: LiveRecord
    word: Literal["rank", "scale"]

    def read(self, rows: Span) -> Tensor:
        """int64 or float64 [layers, sites]; 0 for a module that is not targeted."""
        start = self.record.descriptor
        count = 2 * self.record.layers * len(SITES)
        heads = self.record.arena.descriptors[start : start + count].cpu()
        by_site = heads.view(self.record.layers, len(SITES), 2)[rows.slice]
        if self.word == "scale":
            return by_site[..., 1].contiguous().view(torch.float64)
        return by_site[..., 0] & ((1 << _RANK_BITS) - 1)

    def cell(self, row: int, col: int) -> Cell:
        """The module's word."""
        at = self.record.head(row, col) + (self.word == "scale")
        return cell_of(self.record.arena.descriptors, at)
