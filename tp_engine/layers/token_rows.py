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

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.dispatch import Ops
from kernels.nf4 import DenseWeight

__all__ = ["ArenaMatrix", "TokenRows"]

SLAB_BYTES = 32 << 20
"""Of a matrix that is read at a time: what its product needs of memory beside the arena."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ArenaMatrix:
    """A matrix in chunks of whole rows; the last one has room for as many as the others."""

    values: Tensor
    """The whole arena, flat, as values of the matrix's dtype."""
    starts: Tensor
    """int64 [chunks], on the arena's device: where each chunk begins, counted in values."""
    rows: int
    columns: int
    chunk_rows: int
    """At least 1."""

    def pick(self, rows: Tensor) -> Tensor:
        """int64 [m], each below the number of rows -> [m, columns]."""
        chunks, places = rows // self.chunk_rows, rows % self.chunk_rows
        at = self.starts[chunks] + places * self.columns
        return self._windows(self.columns).index_select(0, at)

    def slabs(self) -> Iterator[tuple[slice, Tensor]]:
        """All rows in order, some at a time: which, and they [some, columns]."""
        width = self.chunk_rows * self.columns
        step = max(1, SLAB_BYTES // (width * self.values.element_size()))
        for first in range(0, self.starts.numel(), step):
            chunks = self._windows(width).index_select(0, self.starts[first : first + step])
            start = first * self.chunk_rows
            stop = min(start + chunks.shape[0] * self.chunk_rows, self.rows)
            yield slice(start, stop), chunks.view(-1, self.columns)[: stop - start]

    def read(self) -> Tensor:
        """[rows, columns], a copy."""
        return torch.cat([part for _, part in self.slabs()])

    def _windows(self, width: int) -> Tensor:
        """The arena as overlapping rows [places, width], one at every value."""
        return self.values.as_strided((self.values.numel() - width + 1, width), (1, 1))


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
            for span, rows in self.whole.slabs():
                y[:, span] = _product(x, rows, ops)
        if self.ids is not None and self.replaced is not None:
            y.index_copy_(1, self.ids, _product(x, self.replaced.read(), ops))
        if self.tokens is not None and self.hidden is not None:
            h = _product(x.float(), self.hidden.read(), ops)
            for span, rows in self.tokens.slabs():
                delta = self.scale * _product(h, rows, ops)
                y[:, span] = (y[:, span].float() + delta).to(y.dtype)


def _product(x: Tensor, rows: Tensor, ops: Ops) -> Tensor:
    """x [m, K] times rows [N, K], transposed: [m, N] of x's dtype, summed in float32."""
    return ops.linear(x, DenseWeight(weight=rows.to(x.dtype).contiguous()))
