"""Groups the adapter segments of a step into batched products, on the host.

    items      one (segment, rows) each: adapter a, rows 3..5   adapter b, rows 5..6   ...
    group      items whose adapters have the same ranks at the sites of an op, padded to one count

A group is one gather of rank-rows and one batched product, however many adapters it holds.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.lora import LoraSegments

Words = NDArray[np.int64]

THIN = 8
"""Items of up to so many rows share a product; longer ones are worth one of their own."""
_GATHER_LIMIT = 4096  # rank-rows a gather
ROW_ALIGNMENT = 16
"""Every rank-row begins at a multiple of so many bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowGroup:
    """Items of equal ranks. I items, m rows each (padded), R rank-rows of A an item in all."""

    items: Words
    """[I], indices of the items."""
    count: int
    """m."""
    take: slice | Tensor
    """The I * m rows of the step, padding included (a row repeated)."""
    keep: Tensor | None
    """int64, places of the true rows among the I * m; None: no padding."""
    rows: slice | Tensor
    """The true rows of the step, in the order of `keep`."""
    ranks: tuple[int, ...]
    """The rank at each site of the layer."""
    ramp: Words
    """[2R, 1], the place of each rank-row among those of its site: R of A, then R of B."""

    def columns(self, side: int, site: int) -> slice:
        """Where a site's rank-rows of A (side 0) or B (side 1) lie among the 2R."""
        start = side * sum(self.ranks) + sum(self.ranks[:site])
        return slice(start, start + self.ranks[site])


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """Rows start .. start + count of one adapter."""

    number: int
    start: int
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerGroup:
    """A group, and where its rank-rows lie in one layer."""

    group: RowGroup
    """The rows."""
    units: Tensor
    """int64 [2R, I], the start of each rank-row in units of `ROW_ALIGNMENT` bytes."""
    scales: Tensor
    """float32 [S, I, 1, 1]."""


class StepBatches:
    """The groups of one step. Lives in `LoraSegments.memo`, so that no record outlives its step."""

    def __init__(self, segments: LoraSegments, descriptors: Tensor, tile: int | None) -> None:
        """With `tile`, items are cut and padded to that many rows: one shape for every batch."""
        bounds: list[int] = segments.offsets.tolist()
        self.total = bounds[-1]
        self.items = list(_items(bounds, segments.descriptors.tolist(), tile))
        self._tile = tile
        self._max_rank = segments.max_rank
        self._words: Words = descriptors.numpy()
        self._numbers = np.array([item.number for item in self.items], dtype=np.int64)
        self._layers: dict[tuple[int, int], list[LayerGroup]] = {}
        self._groups: dict[bytes, list[RowGroup]] = {}
        self._places: dict[tuple[int, int, torch.dtype], Tensor] = {}

    def groups(self, layer: int, num_sites: int) -> list[LayerGroup]:
        """Return the groups of a layer; items without a rank at any site are left out."""
        key = (layer, num_sites)
        if key not in self._layers:
            self._layers[key] = self._read_layer(layer, num_sites)
        return self._layers[key]

    def places(self, arena: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        """Return the arena as overlapping rows [places, width], one at every unit."""
        key = (arena.data_ptr(), width, dtype)
        if key not in self._places:
            size, unit = dtype.itemsize, ROW_ALIGNMENT // dtype.itemsize
            elements = arena[: arena.numel() // size * size].view(dtype)
            count = (elements.numel() - width) // unit + 1
            self._places[key] = elements.as_strided((count, width), (unit, 1))
        return self._places[key]

    def _read_layer(self, layer: int, num_sites: int) -> list[LayerGroup]:
        at = self._numbers[:, None] + 2 * (layer * num_sites + np.arange(num_sites))
        heads, scales = self._words[at], self._words[at + 1].view(np.float64)
        ranks, first = heads & 0xFFFF, self._numbers[:, None] + (heads >> 16)
        key = ranks.tobytes()
        if key not in self._groups:
            self._groups[key] = self._partition(ranks, layer)
        return [self._locate(group, first, scales) for group in self._groups[key]]

    def _locate(self, group: RowGroup, first: Words, scales: NDArray[np.float64]) -> LayerGroup:
        starts = first[group.items].repeat(group.ranks, axis=1).T  # [R, I]
        words = self._words[np.concatenate((starts, starts)) + group.ramp]  # [2R, I]
        scale = scales[group.items].T.astype(np.float32)
        return LayerGroup(
            group=group,
            units=torch.from_numpy(np.ascontiguousarray(words // ROW_ALIGNMENT)),
            scales=torch.from_numpy(scale)[:, :, None, None],
        )

    def _partition(self, ranks: Words, layer: int) -> list[RowGroup]:
        if ranks.size and int(ranks.max()) > self._max_rank:
            raise ValueError(
                f"segments.max_rank must be >= {ranks.max()}, the rank of an adapter in layer "
                f"{layer}, got {self._max_rank}"
            )
        classes: dict[tuple[int, ...], list[int]] = {}
        for index, row in enumerate(map(tuple, ranks.tolist())):
            if any(row):
                classes.setdefault(row, []).append(index)
        return [
            self._group(part, row)
            for row, members in classes.items()
            for part in self._parts(members, sum(row))
        ]

    def _parts(self, members: list[int], rank_rows: int) -> Iterator[list[int]]:
        """Yield items that share a product: thin ones together, the others alone."""
        limit = THIN if self._tile is None else self._tile
        thin = [i for i in members if self.items[i].count <= limit]
        step = max(1, _GATHER_LIMIT // rank_rows)
        yield from (thin[at : at + step] for at in range(0, len(thin), step))
        yield from ([i] for i in members if self.items[i].count > limit)

    def _group(self, members: list[int], ranks: tuple[int, ...]) -> RowGroup:
        items = [self.items[i] for i in members]
        count = self._tile or max(item.count for item in items)
        rows = [r for item in items for r in range(item.start, item.start + item.count)]
        padded = len(rows) != count * len(items)
        take = [item.start + min(i, item.count - 1) for item in items for i in range(count)]
        keep = [n * count + i for n, item in enumerate(items) for i in range(item.count)]
        return RowGroup(
            items=np.array(members, dtype=np.int64),
            count=count,
            take=torch.tensor(take) if padded else _selector(take),
            keep=torch.tensor(keep) if padded else None,
            rows=_selector(rows),
            ranks=ranks,
            ramp=np.concatenate(
                [np.arange(r) for r in ranks] + [np.arange(r, 2 * r) for r in ranks]
            )[:, None],
        )


def _items(bounds: list[int], numbers: list[int], tile: int | None) -> Iterator[Item]:
    for start, stop, number in zip(bounds, bounds[1:], numbers, strict=False):
        if number >= 0:
            step = tile or max(1, stop - start)
            for at in range(start, stop, step):
                yield Item(number=number, start=at, count=min(step, stop - at))


def _selector(rows: list[int]) -> slice | Tensor:
    """A slice where rows follow each other (a view, no copy), else an index."""
    if rows == list(range(rows[0], rows[0] + len(rows))):
        return slice(rows[0], rows[0] + len(rows))
    return torch.tensor(rows)


__all__ = ["ROW_ALIGNMENT", "Item", "LayerGroup", "RowGroup", "StepBatches"]
