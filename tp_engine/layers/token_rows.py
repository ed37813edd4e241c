"""What adapters change of the two matrices with one row a token: the embedding and the LM head.

Legend: V local vocabulary rows (may be 0), H hidden size, r LoRA rank, n replaced rows, m rows of
a step with one adapter.

Such a matrix is too long for rank-rows: a column of V values may exceed a page. So adapters keep it
token by token, in *chunks* of whole rows, and a row is found as chunk and place in it::

    arena | .. [row 0 | row 1 | row 2 | row 3] .... [row 4 | row 5 | row 6 | (room)] .. |
               ^ starts[0]                          ^ starts[1]                rows 7, chunk_rows 4

All of it is plain indexing of the arena without a wait for the device; a step in which no row has
such an adapter never comes here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.dispatch import Ops
from kernels.nf4 import DenseWeight
from tp_engine.interpreter import giving_way

__all__ = ["ArenaMatrix", "TokenRows", "slabs_of"]

SLAB_BYTES = 128 << 20
"""Read of a matrix at a time: what its product needs of memory beside the arena."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ArenaMatrix:
    """A matrix in chunks of whole rows; the last one has room for as many as the others."""

    values: Tensor
    """The whole arena, flat, as values of the matrix's dtype."""
    starts: Tensor
    """int64 [chunks], on the arena's device: where each chunk begins, counted in values."""
    slabs: tuple[tuple[Tensor, ...], ...]
    """All rows in order, as `slabs_of` makes them."""
    columns: int
    chunk_rows: int
    """At least 1."""

    @property
    def rows(self) -> int:
        """How many there are."""
        return sum(view.shape[0] for slab in self.slabs for view in slab)

    def pick(self, rows: Tensor) -> Tensor:
        """int64 [m], each below the number of rows -> [m, columns]."""
        chunks, places = rows // self.chunk_rows, rows % self.chunk_rows
        at = self.starts[chunks] + places * self.columns
        windows = (self.values.numel() - self.columns + 1, self.columns)
        return self.values.as_strided(windows, (1, 1)).index_select(0, at)

    def parts(self) -> Iterator[tuple[slice, Tensor]]:
        """All rows in order, a slab at a time: which, and they [some, columns], not to be
        written."""
        start = 0
        for views in self.slabs:
            rows = views[0] if len(views) == 1 else torch.cat(views)
            yield slice(start, start + rows.shape[0]), rows
            start += rows.shape[0]

    def read(self) -> Tensor:
        """[rows, columns], not to be written."""
        views = [view for slab in self.slabs for view in slab]
        return views[0] if len(views) == 1 else torch.cat(views)


def slabs_of(
    values: Tensor, starts: Sequence[int], rows: int, columns: int, chunk_rows: int
) -> tuple[tuple[Tensor, ...], ...]:
    """The rows of a matrix as views of the arena, in order, some [.., columns] a slab.

    A slab is one view where its chunks follow each other in the arena, and is read where it
    stands; the views of any other are copied together, as fast as memory goes. Which rows are a
    slab's does not depend on where they stand, so neither does the order of any sum.

    Args:
        values: the whole arena, flat.
        starts: of each chunk, counted in values.
        rows, columns: of the matrix, at least 1.
        chunk_rows: of every chunk but the last, which may have fewer.
    """
    width = chunk_rows * columns
    step = max(1, SLAB_BYTES // (width * values.element_size()))
    slabs = []
    for first in range(0, len(starts), step):
        size = min(step * width, rows * columns - first * width)
        runs = giving_way(_runs(starts[first : first + step], size, width))
        slabs.append(tuple(values[at : at + length].view(-1, columns) for at, length in runs))
    return tuple(slabs)


def _runs(starts: Sequence[int], size: int, width: int) -> Iterator[tuple[int, int]]:
    """(start, length) of what stands in one piece of ``size`` values in chunks of ``width``."""
    first = 0
    for chunk, start in enumerate(starts):
        stop = start + width
        if chunk + 1 == len(starts):
            yield starts[first], size - first * width
        elif starts[chunk + 1] != stop:
            yield starts[first], (chunk + 1 - first) * width
            first = chunk + 1


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenRows:
    """What one adapter changes of one matrix W [V, H] on one rank: first it takes the place of W
    or of some rows, then scale * tokens @ hidden is added."""

    whole: ArenaMatrix | None = None
    """[V, H], in the place of W; None: W stays."""
    ids: Tensor | None = None
    """int64 [n], ascending, on the arena's device: which rows are replaced."""
    replaced: ArenaMatrix | None = None
    """[n, H], those rows; None without ids."""
    tokens: ArenaMatrix | None = None
    """[V, r]; None: nothing is added."""
    hidden: ArenaMatrix | None = None
    """[r, H], beside ``tokens``."""
    scale: float = 0.0

    def embed_(self, rows: Tensor, tokens: Tensor, size: int, ops: Ops) -> None:
        """Let rows [m, H] be what W as it is changed holds of some tokens; zeros stay where a
        token is not among the ``size`` local ones.

        Args:
            rows: as W itself holds them; written in place.
            tokens: int64 [m], counted from the first local one.
            size: V, at least 1.
        """
        held = ((tokens >= 0) & (tokens < size))[:, None]
        local = tokens.clamp(0, size - 1)
        found = rows
        if self.whole is not None:
            found = torch.where(held, self.whole.pick(local), found)
        if self.ids is not None and self.replaced is not None:
            place = torch.searchsorted(self.ids, local).clamp(max=self.ids.numel() - 1)
            hit = held & (self.ids[place] == local)[:, None]
            found = torch.where(hit, self.replaced.pick(place), found)
        if self.tokens is not None and self.hidden is not None:
            h = self.tokens.pick(local).float()
            delta = _product(h, self.hidden.read().T, ops)
            total = found.float() + self.scale * delta
            found = torch.where(held, total.to(rows.dtype), found)
        rows.copy_(found)

    def project_(self, y: Tensor, x: Tensor, ops: Ops) -> None:
        """Let y [m, V] be x [m, H] times W as it is changed; on entry it is x times W."""
        if self.whole is not None:
            for span, rows in self.whole.parts():
                y[:, span] = _product(x, rows, ops)
        if self.ids is not None and self.replaced is not None:
            y.index_copy_(1, self.ids, _product(x, self.replaced.read(), ops))
        if self.tokens is not None and self.hidden is not None:
            h = _product(x.float(), self.hidden.read(), ops)
            for span, rows in self.tokens.parts():
                delta = self.scale * _product(h, rows, ops)
                y[:, span] = (y[:, span].float() + delta).to(y.dtype)


def _product(x: Tensor, rows: Tensor, ops: Ops) -> Tensor:
    """x [m, K] times rows [N, K], transposed: [m, N] of x's dtype, summed in float32."""
    return ops.linear(x, DenseWeight(weight=rows.to(x.dtype).contiguous()))
