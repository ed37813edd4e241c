"""The parts of a live NF4 weight, in the canonical form or in that which the GPU kernels read.

Legend: n rows that are read, k columns of the slice.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import NF4Weight
from kernels.nf4 import PackedNF4
from kernels.nf4.packed import find_absmax, find_code, tiles_of, unpack
from kernels.nf4.packed_weight import BLOCK
from launch.validation.live import Cell, bits_of, cell_of
from sharding import Span, WeightSlice, expand


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Shard:
    """The rows of one module in a live NF4 weight, which may hold other modules' rows too."""

    weight: NF4Weight | PackedNF4
    first: int
    """The module's first row in the weight."""
    part: WeightSlice
    """Unsharded rows and columns of the module's slice."""
    width: int
    """Columns of the unsharded weight."""
    blocksize: int
    """Elements of the unsharded weight that share an absmax."""

    def phases(self, rows: Span) -> Tensor:
        """int32 [n]: what the phases of the rows must be; they follow from the slice alone."""
        row = torch.arange(rows.start, rows.stop) + self.part.rows.start
        starts = row * self.width + self.part.cols.start
        return (starts % self.blocksize).to(torch.int32)

    def taken(self, rows: Span) -> Span:
        """Rows of the weight."""
        return Span(self.first + rows.start, self.first + rows.stop)

    def rows(self, rows: Span) -> NF4Weight:
        """A copy of some rows on the CPU, with the right phases: the live ones are compared
        apart, and wrong ones would lead out of the scales."""
        taken = self.taken(rows)
        if isinstance(self.weight, PackedNF4):
            weight = unpack(tiles_of(self.weight, taken.start, taken.stop))
            taken = Span(taken.start % 16, taken.start % 16 + taken.size)
            phases = torch.zeros(taken.size, dtype=torch.int32)
        else:
            weight, phases = self.weight, self.phases(rows)
        return NF4Weight(
            codes=weight.codes[taken.slice].cpu(),
            absmax=weight.absmax[taken.slice].cpu(),
            phase=phases,
            columns=weight.columns,
            blocksize=weight.blocksize,
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Codes:
    """The 4-bit codes, uint8 0 to 15."""

    shard: Shard

    def read(self, rows: Span) -> Tensor:
        """Unpacked."""
        return expand(self.shard.rows(rows)).codes

    def cell(self, row: int, col: int) -> Cell:
        """One half of a byte; in the canonical form even columns stand in the high one."""
        weight, row = self.shard.weight, self.shard.first + row
        if isinstance(weight, PackedNF4):
            word, nibble = find_code(weight, row, col)
            return Cell(bits=bits_of(weight.words, 32 * word + 4 * nibble, 4))
        byte = row * weight.codes.shape[1] + col // 2
        return Cell(bits=bits_of(weight.codes, 8 * byte + (0 if col % 2 else 4), 4))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Scales:
    """The absmax of each element."""

    shard: Shard

    def read(self, rows: Span) -> Tensor:
        """One an element: those of a block are equal."""
        return expand(self.shard.rows(rows)).absmax

    def cell(self, row: int, col: int) -> Cell | None:
        """The absmax of the row's part of the block."""
        shard, weight = self.shard, self.shard.weight
        if isinstance(weight, PackedNF4):
            if shard.blocksize != BLOCK:
                return None  # a larger block's absmax is kept several times
            word, half = find_absmax(weight, shard.first + row, col // BLOCK)
            first = 32 * word + 16 * half
            return Cell(bits=bits_of(weight.rest, first, 16) + bits_of(weight.scales, first, 16))
        block = (int(shard.phases(Span(row, row + 1))) + col) // weight.blocksize
        return cell_of(weight.absmax, (shard.first + row) * weight.absmax.shape[1] + block)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Phases:
    """Where each row begins in its block; a packed weight has none: its rows begin with one."""

    shard: Shard

    def read(self, rows: Span) -> Tensor:
        """int32 [n, 1]."""
        if isinstance(self.shard.weight, PackedNF4):
            return torch.zeros((rows.size, 1), dtype=torch.int32)
        return self.shard.weight.phase[self.shard.taken(rows).slice].cpu()[:, None]

    def cell(self, row: int, col: int) -> Cell | None:
        """The row's own."""
        if isinstance(self.shard.weight, PackedNF4):
            return None
        return cell_of(self.shard.weight.phase, self.shard.first + row)
