"""Groups the adapter segments of a step into batched products, on the host.

    items      one (segment, rows) each: adapter a, rows 3..5   adapter b, rows 5..6   ...
    group      items whose adapters have the same ranks at the sites of an op, padded to one count

A group is one gather of rank-rows and one batched product, however many adapters it holds.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.lora import LoraBatch

Words = NDArray[np.int64]

THIN = 8
"""Items of up to so many rows share a product; longer ones are worth one of their own."""
_GATHER_LIMIT = 4096  # rank-rows a gather
ROW_ALIGNMENT = 16
"""Every rank-row begins at a multiple of so many bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowGroup:
    """Items of equal ranks. I items, m rows each (padded), R rank-rows of A an item in all."""

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
    starts: tuple[int, ...]
    """[S + 1], sums of the ranks before each site."""
    items: Words
    """[I], indices of the items."""
    order: tuple[Words, Words, Words]
    """(item, site, place among the site's 2r) of all rank-rows in the order of `LayerGroup`."""
    runs: dict[object, list["Run"]] = field(default_factory=dict)
    """What `site_runs` found."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Sites of an op whose B has one rank and one width, side by side: one product."""

    sites: slice
    """Their places in the op."""
    rank: int
    """r."""
    start: int
    """First column in y."""
    width: int
    """Columns of each site."""
    columns: slice
    """Their rank-rows in `LayerGroup.b`, as multiples of I."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """Rows start .. start + count of one adapter."""

    number: int
    start: int
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerGroup:
    """A group, and where its rank-rows lie in one layer, in units of `ROW_ALIGNMENT` bytes."""

    group: RowGroup
    """The rows."""
    a: Tensor
    """int64 [R, I], rows of A, site after site."""
    b: Tensor
    """int64 [R * I], columns of B: by site, then by item."""
    scales: Tensor
    """float32 [S, I, 1, 1]."""


class StepBatches:
    """The groups of one step. Lives in `LoraSegments.memo`, so that no record outlives its step."""

    def __init__(self, batch: LoraBatch, tile: int | None) -> None:
        """With `tile`, items are cut and padded to that many rows: one shape for every batch."""
        segments = batch.segments
        bounds: list[int] = segments.offsets.tolist()
        self.total = bounds[-1]
        self.items = list(_items(bounds, segments.descriptors.tolist(), tile))
        self._tile = tile
        self._max_rank = segments.max_rank
        self._words: Words = batch.descriptors.numpy()
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
        item, site, place = group.order
        units = torch.from_numpy(self._words[first[item, site] + place] // ROW_ALIGNMENT)
        half, count = units.shape[0] // 2, len(group.items)
        scale = scales[group.items].T.astype(np.float32)
        return LayerGroup(
            group=group,
            a=units[:half].view(-1, count),
            b=units[half:],
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
            count=count,
            take=torch.tensor(take) if padded else _selector(take),
            keep=torch.tensor(keep) if padded else None,
            rows=_selector(rows),
            ranks=ranks,
            starts=tuple(accumulate(ranks, initial=0)),
            items=np.array(members, dtype=np.int64),
            order=_order(members, ranks),
        )


def site_runs(
    group: RowGroup, sites: tuple[int, ...], spans: tuple[tuple[int, int], ...]
) -> list[Run]:
    """Return the products of an expand; sites without a rank or a width are left out."""
    if (sites, spans) not in group.runs:
        runs: list[Run] = []
        for i, (site, (start, width)) in enumerate(zip(sites, spans, strict=True)):
            if group.ranks[site] and width:
                columns = slice(group.starts[site], group.starts[site + 1])
                _append_run(
                    runs,
                    Run(
                        sites=slice(i, i + 1),
                        rank=group.ranks[site],
                        start=start,
                        width=width,
                        columns=columns,
                    ),
                )
        group.runs[sites, spans] = runs
    return group.runs[sites, spans]


def _append_run(runs: list[Run], new: Run) -> None:
    """Append a run of one site, or let the last run grow by it."""
    last = runs[-1] if runs else None
    if (
        last is not None
        and (last.rank, last.width) == (new.rank, new.width)
        and last.sites.stop == new.sites.start
        and last.columns.stop == new.columns.start
        and last.start + (last.sites.stop - last.sites.start) * last.width == new.start
    ):
        runs[-1] = replace(
            last,
            sites=slice(last.sites.start, new.sites.stop),
            columns=slice(last.columns.start, new.columns.stop),
        )
    else:
        runs.append(new)


def _order(members: list[int], ranks: tuple[int, ...]) -> tuple[Words, Words, Words]:
    """The order of a group's rank-rows: A by row, then item; B by site, item, then column."""
    a = [(item, s, i) for s, r in enumerate(ranks) for i in range(r) for item in members]
    b = [(item, s, r + i) for s, r in enumerate(ranks) for item in members for i in range(r)]
    item, site, place = np.array(a + b, dtype=np.int64).T
    return item, site, place


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


__all__ = ["ROW_ALIGNMENT", "Item", "LayerGroup", "RowGroup", "StepBatches", "site_runs"]
