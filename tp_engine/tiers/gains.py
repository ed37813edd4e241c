"""The gains of DoRA adapters: magnitude / norm of each row of W + scale * B A.

W is what the rank serves with, de-quantised a few rows at a time, so the gains fit it exactly and
no copy of the base is needed. All of it happens in the thread that brings adapters, beside the
steps.

Legend: N, K local out- and in-features of a module, r its LoRA rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kernels import Ops, Weight
from kernels.nf4.slices import float_rows
from sharding import SITES, ModelDims, RankCut, is_row_parallel, weight_slice
from tp_engine.adapters import AdapterImage, rows_of
from tp_engine.adapters.record import gain_places, gain_row
from tp_engine.ranks.background import Together
from tp_engine.ranks.comm import Comm
from tp_engine.shortage import asking_for
from tp_engine.tiers.host_memory import zeroed_pages
from tp_engine.weights import RankWeights

GAINS = "the gains of a DoRA adapter"

CHUNK_ELEMENTS = 1 << 22
"""Of a weight that are looked at together: 32 MiB in float64."""

CHUNK_ROWS = 128
"""A larger chunk is of a multiple: packed weights are expanded in such."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Part:
    """What a rank brings along."""

    image: AdapterImage
    """A copy, whose gain rows are still magnitudes."""
    squares: dict[tuple[int, int], Tensor]
    """float64 [N] by place: squared norms of this rank's part of the rows."""
    summed: Tensor
    """float64: those whose columns ranks have cut, one after the other."""
    room: list[Tensor]
    """Like ``summed``, for every rank's."""


class RankGains:
    """One rank's part in turning magnitudes into gains."""

    def __init__(
        self,
        weights: RankWeights,
        cut: RankCut,
        dims: ModelDims,
        ops: Ops,
        comm: Comm,
        dtype: torch.dtype,
    ) -> None:
        """``dtype`` is that of A and B in page images."""
        self._weights = weights
        self._cut = cut
        self._dims = dims
        self._ops = ops
        self._comm = comm
        self._dtype = dtype
        self._stream: torch.cuda.Stream | None = None

    @torch.no_grad()
    def finish(self, image: AdapterImage, together: Together) -> AdapterImage:
        """The image with gains in the place of magnitudes; the same one if it has none.

        Every rank must call it with its image of the same adapter, in one thread.

        Args:
            image: of this rank.
            together: of that thread's lane.

        Raises:
            OutOfMemory: a rank has no memory for it.
        """
        places = gain_places(image.record, self._dims.layers)
        if not places:
            return image
        nbytes = image.pages.nbytes + CHUNK_ELEMENTS * torch.float64.itemsize
        part = together(GAINS, nbytes, partial(self._part, image, places))
        summed = [part.summed]
        if part.summed.numel():  # as it has on all ranks, or on none
            summed = self._comm.exchange_background(part.summed, part.room)
        with asking_for(GAINS, nbytes):
            total = torch.stack(summed).sum(0)
            for place, square in part.squares.items():
                if is_row_parallel(place[1]):
                    square, total = total[: square.numel()], total[square.numel() :]
                row = gain_row(part.image.pages, image.record, *place, square.numel())
                row.copy_(gains_of(row, square))
        return part.image

    def _part(self, image: AdapterImage, places: list[tuple[int, int]]) -> _Part:
        """All that this rank finds out by itself."""
        pages = zeroed_pages(*image.pages.shape).copy_(image.pages)
        with self._beside_the_steps():
            squares = {place: self._squares(image, place) for place in places}
        rows = [square for place, square in squares.items() if is_row_parallel(place[1])]
        summed = torch.cat([torch.zeros(0, dtype=torch.float64), *rows])
        return _Part(
            image=AdapterImage(pages=pages, record=image.record),
            squares=squares,
            summed=summed,
            room=[torch.empty_like(summed) for _ in range(self._comm.world)],
        )

    def _squares(self, image: AdapterImage, place: tuple[int, int]) -> Tensor:
        """float64 [N] on the host: squared norms of this rank's part of the rows."""
        layer, site = place
        part = weight_slice(self._dims, self._cut.layers[layer], site)
        rows = rows_of(
            image.pages,
            image.record,
            layer=layer,
            site=site,
            in_features=part.cols.size,
            out_features=part.rows.size,
            dtype=self._dtype,
        )
        assert rows is not None
        a, b, scale = rows
        weight, first = self._weight(layer, site)
        device = self._comm.device
        return squared_norms(weight, first, a.to(device), b.to(device), scale, self._ops)

    def _weight(self, layer: int, site: int) -> tuple[Weight, int]:
        """The weight that holds a site, and the site's first row in it."""
        held, name = self._weights.layers[layer], SITES[site]
        if name in ("o_proj", "down_proj"):
            return (held.o if name == "o_proj" else held.down), 0
        members, base = (held.qkv, 0) if site < 3 else (held.gate_up, 4)
        if len(members) > 1:
            return members[site - base], 0
        cut = self._cut.layers[layer]
        before = [weight_slice(self._dims, cut, each).rows.size for each in range(base, site)]
        return members[0], sum(before)

    def _beside_the_steps(self) -> AbstractContextManager[object]:
        if self._comm.device.type != "cuda":
            return nullcontext()
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._comm.device)  # type: ignore[no-untyped-call]
        return torch.cuda.stream(self._stream)


def squared_norms(
    weight: Weight, first: int, a: Tensor, b: Tensor, scale: float, ops: Ops
) -> Tensor:
    """Squared norms of the rows of W + scale * B A, on the host: float64 [N].

    Norms are taken of the sum itself in float64, as its parts may cancel, so that ranks which hold
    columns come to the same whatever the cut.

    Args:
        weight: whose rows from ``first`` on are W [N, K].
        first: row.
        a: [r, K].
        b: [N, r].
        scale: of B A.
        ops: of the weight's device.
    """
    count, width = b.shape[0], a.shape[1]
    a = a.double()
    parts = []
    for start, stop in _chunks(count, width):
        rows = float_rows(weight, first + start, first + stop, ops.dequantize).double()
        rows.addmm_(b[start:stop].double(), a, alpha=scale)
        # Waits for the device, so that no more than one chunk is ever under way.
        parts.append(rows.square_().sum(1).cpu())
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)


def gains_of(magnitudes: Tensor, squares: Tensor) -> Tensor:
    """float32 [N]. A row of zeros gives 0 with any gain: its gain is 0, not infinite."""
    norms = squares.sqrt()
    return torch.where(norms > 0, magnitudes.double() / norms, 0.0).float()


def _chunks(rows: int, width: int) -> Iterator[tuple[int, int]]:
    step = max(1, CHUNK_ELEMENTS // max(1, width))
    step -= step % CHUNK_ROWS if step > CHUNK_ROWS else 0
    for start in range(0, rows, step):
        yield start, min(rows, start + step)
