"""What a rank computes with, element by element in the order of the unsharded tensor.

Every class here looks at one live tensor: `read` gives its elements, `cell` the memory behind one
of them. Rows and columns are local to the rank's slice. Nothing is copied but what is read.

Legend: n rows that are read, k columns of the slice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kernels import NF4Weight
from sharding import Span, WeightSlice, expand


class LiveError(ValueError):
    """A live tensor cannot be read, because what says where it stands is wrong."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Cell:
    """The bits of one element."""

    memory: Tensor
    """Contiguous, any dtype; shares the rank's memory."""
    byte: int
    """First byte of the element."""
    bits: tuple[int, ...]
    """Bits that belong to it, counted from the lowest bit of that byte."""

    def flip(self, choice: int) -> None:
        """Invert bit ``bits[choice]``; a second time restores it."""
        at, bit = divmod(self.bits[choice], 8)
        raw = self.memory.view(-1).view(torch.uint8)
        raw[self.byte + at] ^= 1 << bit


class Live(Protocol):
    """One live tensor."""

    def read(self, rows: Span) -> Tensor:
        """[n, k] on the CPU. Raises `LiveError` when it cannot be found."""
        ...

    def cell(self, row: int, col: int) -> Cell:
        """The memory of one element."""
        ...


def cell_of(memory: Tensor, element: int) -> Cell:
    """An element of a contiguous tensor."""
    size = memory.dtype.itemsize
    return Cell(memory=memory, byte=element * size, bits=tuple(range(8 * size)))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Plain:
    """A tensor kept as it is."""

    tensor: Tensor
    """[rows, k], contiguous; of a vector [rows, 1]."""

    def read(self, rows: Span) -> Tensor:
        """Its own rows."""
        return self.tensor[rows.slice].cpu()

    def cell(self, row: int, col: int) -> Cell:
        """Its own element."""
        return cell_of(self.tensor, row * self.tensor.shape[1] + col)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Copy:
    """The rows of one module in a copy that may have a layout of its own."""

    tensor: Tensor
    """[N, k] of all fused modules."""
    first: int
    """The module's first row."""

    def read(self, rows: Span) -> Tensor:
        """Its own rows."""
        plain = self.tensor.to_dense() if self.tensor.is_mkldnn else self.tensor
        return plain[self.first + rows.start : self.first + rows.stop].cpu()

    def cell(self, row: int, col: int) -> Cell:
        """Not to be had: the layout is the library's own."""
        raise LiveError("a copy has no places that are known")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Packed:
    """The rows of one module in a live NF4 weight, which may hold other modules' rows too."""

    weight: NF4Weight
    first: int
    """The module's first row in the weight."""
    part: WeightSlice
    """Unsharded rows and columns of the module's slice."""
    width: int
    """Columns of the unsharded weight."""

    def phases(self, rows: Span) -> Tensor:
        """int32 [n]: what the phases of the rows must be; they follow from the slice alone."""
        row = torch.arange(rows.start, rows.stop) + self.part.rows.start
        starts = row * self.width + self.part.cols.start
        return (starts % self.weight.blocksize).to(torch.int32)

    def taken(self, rows: Span) -> Span:
        """Rows of the weight."""
        return Span(self.first + rows.start, self.first + rows.stop)

    def rows(self, rows: Span) -> NF4Weight:
        """A copy of some rows on the CPU, with the right phases: the live ones are compared
        apart, and wrong ones would lead out of the scales."""
        taken = self.taken(rows).slice
        return NF4Weight(
            codes=self.weight.codes[taken].cpu(),
            absmax=self.weight.absmax[taken].cpu(),
            phase=self.phases(rows),
            columns=self.weight.columns,
            blocksize=self.weight.blocksize,
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Codes:
    """The 4-bit codes, uint8 0 to 15."""

    packed: Packed

    def read(self, rows: Span) -> Tensor:
        """Unpacked."""
        return expand(self.packed.rows(rows)).codes

    def cell(self, row: int, col: int) -> Cell:
        """One half of a byte; even columns stand in the high one."""
        codes = self.packed.weight.codes
        byte = (self.packed.first + row) * codes.shape[1] + col // 2
        low = 0 if col % 2 else 4
        return Cell(memory=codes, byte=byte, bits=tuple(range(low, low + 4)))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Scales:
    """The absmax of each element."""

    packed: Packed

    def read(self, rows: Span) -> Tensor:
        """One an element: those of a block are equal."""
        return expand(self.packed.rows(rows)).absmax

    def cell(self, row: int, col: int) -> Cell:
        """The absmax of the row's part of the block."""
        weight = self.packed.weight
        block = (int(self.packed.phases(Span(row, row + 1))) + col) // weight.blocksize
        return cell_of(weight.absmax, (self.packed.first + row) * weight.absmax.shape[1] + block)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Phases:
    """Where each row begins in its block."""

    packed: Packed

    def read(self, rows: Span) -> Tensor:
        """int32 [n, 1]."""
        return self.packed.weight.phase[self.packed.taken(rows).slice].cpu()[:, None]

    def cell(self, row: int, col: int) -> Cell:
        """The row's own."""
        return cell_of(self.packed.weight.phase, self.packed.first + row)
