"""Where the rows of an adapter go in its pages: index arithmetic only.

A *group* is the rows of one side of one module: the rows of A, the columns of B, or the one row of
its gain or bias. Groups are placed longest row first, each into the first page whose rest holds all
of it, so that its rows stand at one stride; where none does, its rows fill the rests in order, then
new pages::

    page 0  | down.A down.A down.A down.A .... q.B q.B |
    page 1  | o.A o.A o.A gate.A gate.A gate.A v.B v.B |     ....  too short for a row of down.A
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import torch

from sharding import SITES, ModelDims, RankCut, is_row_parallel, weight_slice
from tp_engine.adapters.targets import Place, module_name
from tp_engine.interpreter import giving_way

ROW_ALIGNMENT: Final = 128
"""Every rank-row begins at a multiple of this many bytes of its page."""
PAGE_MULTIPLE: Final = 16
"""Page sizes are multiples of this many bytes, so that no row of the arena is less aligned."""

ROW_DTYPE: Final = torch.float32
"""Of gains and biases, whatever the activations' dtype."""

Side = Literal["A", "B", "bias", "gain"]
EndRole = Literal["tokens", "hidden", "whole", "rows", "ids"]
"""A matrix of one of the model's two ends, see `tp_engine.adapters.ends.layout`."""
GroupKey = tuple[int, int, Side | EndRole]
"""(layer, site, side)."""


@dataclass(frozen=True, slots=True)
class ModuleRows:
    """Which rows a module has, whole or on one rank."""

    rank: int
    """r: rows of A, and columns of B."""
    gain: bool = False
    """Whether there is a gain row: one number an out-feature."""
    bias: bool = False
    """Whether there is a bias row: likewise."""

    def on_rank(self, site: int, rank: int) -> ModuleRows:
        """Those that a rank has: outputs that ranks sum take the bias from the first alone."""
        return replace(self, bias=self.bias and (rank == 0 or not is_row_parallel(site)))


@dataclass(frozen=True, slots=True)
class Group:
    """The rows of one side of one module on one rank."""

    key: GroupKey
    rows: int
    row_bytes: int
    """Length of one row; 0 where the rank holds no unit of the module."""

    @property
    def stride(self) -> int:
        """Bytes from row to row in a run."""
        return align_row(self.row_bytes)


@dataclass(frozen=True, slots=True)
class Run:
    """Rows of a group that stand one after the other in one page."""

    group: Group
    first: int
    """The first of them."""
    count: int
    page: int
    """Index among the adapter's pages."""
    offset: int
    """Bytes from the page's start."""


def align_row(nbytes: int) -> int:
    """The length with its padding."""
    return -(-nbytes // ROW_ALIGNMENT) * ROW_ALIGNMENT


def groups_of(
    modules: Mapping[Place, ModuleRows], cut: RankCut, dims: ModelDims, dtype: torch.dtype
) -> Iterator[Group]:
    """Groups of an adapter's layers on one rank, by (layer, site), A before B before the others.

    Args:
        modules: what each module has, whole; of `sharding.TOP` none.
        dtype: of A and B.
    """
    for (layer, site), module in giving_way(modules.items()):
        part = weight_slice(dims, cut.layers[layer], site)
        held = module.on_rank(site, cut.rank)
        yield Group((layer, site, "A"), held.rank, part.cols.size * dtype.itemsize)
        yield Group((layer, site, "B"), held.rank, part.rows.size * dtype.itemsize)
        if held.gain:
            yield Group((layer, site, "gain"), 1, part.rows.size * ROW_DTYPE.itemsize)
        if held.bias:
            yield Group((layer, site, "bias"), 1, part.rows.size * ROW_DTYPE.itemsize)


def longest_row_bytes(dims: ModelDims, cuts: Sequence[RankCut], dtype: torch.dtype) -> int:
    """Bytes of the longest row of any module on any rank, with its padding."""
    every = {
        (layer, site): ModuleRows(1, gain=True)
        for layer in range(dims.layers)
        for site in range(len(SITES))
    }
    groups = (group for cut in cuts for group in groups_of(every, cut, dims, dtype))
    return max(group.stride for group in groups)


def place_rows(groups: Iterable[Group], page_bytes: int) -> tuple[list[Run], int]:
    """Place groups in pages; rows without bytes take no place.

    Returns:
        The runs, and the number of pages.

    Raises:
        ValueError: ``page_bytes`` is no positive multiple of 16, or a row is longer than a page.
    """
    if page_bytes < 1 or page_bytes % PAGE_MULTIPLE:
        raise ValueError(f"page_bytes={page_bytes} must be a positive multiple of {PAGE_MULTIPLE}")
    order = sorted((g for g in groups if g.row_bytes), key=lambda g: (-g.row_bytes, g.key))
    if order and order[0].row_bytes > page_bytes:
        layer, site, side = order[0].key
        raise ValueError(
            f"a row of {order[0].row_bytes} bytes ({side} of {module_name(layer, site)}) does not "
            f"fit into a page of page_bytes={page_bytes}"
        )
    pages = _Pages(page_bytes, order[-1].row_bytes if order else 0)
    runs = [run for group in giving_way(order) for run in pages.place(group)]
    return runs, pages.count


class _Pages:
    """Pages being filled from the front."""

    def __init__(self, page_bytes: int, shortest: int) -> None:
        self.count = 0
        self._page_bytes = page_bytes
        self._shortest = shortest
        self._filled: dict[int, int] = {}  # page -> bytes, of pages that may take another row

    def place(self, group: Group) -> list[Run]:
        """Take places for all rows of a group."""
        last = self._page_bytes - (group.rows - 1) * group.stride - group.row_bytes
        whole = next((page for page, filled in self._filled.items() if filled <= last), None)
        runs: list[Run] = []
        done = 0
        for page in [*self._filled] if whole is None else [whole]:
            done += self._take(page, group, done, runs)
        while done < group.rows:
            self._filled[self.count] = 0
            self.count += 1
            done += self._take(self.count - 1, group, done, runs)
        return runs

    def _room(self, page: int, group: Group) -> int:
        """How many of the group's rows still fit into a page."""
        rest = self._page_bytes - self._filled[page]
        return 0 if rest < group.row_bytes else (rest - group.row_bytes) // group.stride + 1

    def _take(self, page: int, group: Group, done: int, runs: list[Run]) -> int:
        count = min(self._room(page, group), group.rows - done)
        if count:
            runs.append(Run(group, done, count, page, self._filled[page]))
            self._filled[page] += count * group.stride
            if self._page_bytes - self._filled[page] < self._shortest:
                del self._filled[page]
        return count
