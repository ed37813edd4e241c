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

from sharding import Span


class LiveError(ValueError):
    """A live tensor cannot be read, because what says where it stands is wrong."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Cell:
    """The bits of one element."""

    bits: tuple[tuple[Tensor, int], ...]
    """Of each the memory, contiguous, of any dtype, the rank's own, and the number of the bit in
    it, counted from the lowest bit of its first byte."""

    def flip(self, choice: int) -> None:
        """Invert bit ``bits[choice]``; a second time restores it."""
        memory, number = self.bits[choice]
        byte, bit = divmod(number, 8)
        memory.view(-1).view(torch.uint8)[byte] ^= 1 << bit


class Live(Protocol):
    """One live tensor."""

    def read(self, rows: Span) -> Tensor:
        """[n, k] on the CPU. Raises `LiveError` when it cannot be found."""
        ...

    def cell(self, row: int, col: int) -> Cell | None:
        """The memory of one element; None, of all elements alike, where it is not known."""
        ...


def bits_of(memory: Tensor, first: int, count: int) -> tuple[tuple[Tensor, int], ...]:
    """``count`` bits of a contiguous tensor."""
    return tuple((memory, first + i) for i in range(count))


def cell_of(memory: Tensor, element: int) -> Cell:
    """An element of a contiguous tensor."""
    size = 8 * memory.dtype.itemsize
    return Cell(bits=bits_of(memory, element * size, size))


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

    def cell(self, row: int, col: int) -> None:
        """Not to be had: the layout is the library's own."""
