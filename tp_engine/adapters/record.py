"""Descriptor records: where an adapter's rows stand, as `kernels.lora` reads them.

Legend: L layers, S sites, r LoRA rank of a module, K and N local in- and out-features.

A record is int64 [2 * (L + 1) * S + sum of (2 * r + 2)]: a head of two words a (layer, site), then
for each module the offsets of its r rows of A, of its r columns of B, of its gain row and of its
bias row, `NO_ROW` for one that it does not have. The head has room for one layer more, whose words
are those of the two ends (see `tp_engine.adapters.ends.record`); what they lead to comes last.

In an adapter's page image an offset is page index * page bytes + offset in the page; `relocate`
makes it one in the arena. Every word behind the head is an offset or `NO_ROW`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sharding import SITES
from tp_engine.adapters.layout import ROW_DTYPE
from tp_engine.adapters.targets import Place
from tp_engine.interpreter import giving_way

NO_ROW = -1
"""As an offset: there is no such row."""
RANK_BITS = 16
"""The first word of a site holds its r in so many bits, above them where its offsets begin."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SiteRows:
    """What a record says of one module."""

    a_offsets: Tensor
    """int64 [r], bytes."""
    b_offsets: Tensor
    """int64 [r], bytes."""
    scale: float
    gain_offset: int = NO_ROW
    """Bytes."""
    bias_offset: int = NO_ROW
    """Bytes."""

    @property
    def offsets(self) -> Tensor:
        """int64 [2 * r + 2], as a record has them."""
        others = torch.tensor([self.gain_offset, self.bias_offset])
        return torch.cat([self.a_offsets, self.b_offsets, others])


def head_words(layers: int) -> int:
    """Words before the first offset."""
    return 2 * (layers + 1) * len(SITES)


def build_record(layers: int, sites: Mapping[Place, SiteRows]) -> Tensor:
    """The record of an adapter: int64 [W].

    Args:
        sites: by (layer, site); the others are not targeted.
    """
    head = [0] * head_words(layers)
    parts = []
    first = len(head)
    for (layer, site), rows in giving_way(sites.items()):
        rank = rows.a_offsets.numel()
        assert 0 < rank < 1 << RANK_BITS and rows.b_offsets.numel() == rank
        at = 2 * (layer * len(SITES) + site)
        head[at] = (first << RANK_BITS) | rank
        head[at + 1] = float_bits(rows.scale)
        parts.append(rows.offsets)
        first += parts[-1].numel()
    return torch.cat([torch.tensor(head), *parts])


def float_bits(value: float) -> int:
    """The bits of a float64."""
    return int(torch.tensor(value, dtype=torch.float64).view(torch.int64))


def relocate(record: Tensor, page_ids: Sequence[int], layers: int, page_bytes: int) -> Tensor:
    """The record for pages that stand in the arena: a new int64 [W].

    Args:
        record: with the offsets of a page image.
        page_ids: arena page of each page of the image, in order.
    """
    placed = record.clone()
    offsets = placed[head_words(layers) :]
    ids = torch.tensor(page_ids, dtype=torch.int64)
    moved = ids[offsets.clamp(min=0) // page_bytes] * page_bytes + offsets % page_bytes
    offsets.copy_(torch.where(offsets == NO_ROW, NO_ROW, moved))
    return placed


def site_rows(record: Tensor, layer: int, site: int) -> SiteRows | None:
    """Offsets and scale of one module, None if it is not targeted."""
    at = 2 * (layer * len(SITES) + site)
    head = int(record[at])
    first, rank = head >> RANK_BITS, head & ((1 << RANK_BITS) - 1)
    if rank == 0:
        return None
    return SiteRows(
        a_offsets=record[first : first + rank],
        b_offsets=record[first + rank : first + 2 * rank],
        scale=float(record[at + 1 : at + 2].view(torch.float64)),
        gain_offset=int(record[first + 2 * rank]),
        bias_offset=int(record[first + 2 * rank + 1]),
    )


def rows_of(
    memory: Tensor,
    record: Tensor,
    *,
    layer: int,
    site: int,
    in_features: int,
    out_features: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, float] | None:
    """Read a module's shard back: (A [r, K], B [N, r], scale), None if it is not targeted.

    Args:
        memory: uint8; an image's pages with its own record, or an arena with a relocated one.
        in_features: K.
        out_features: N.
        dtype: of the rows.
    """
    rows = site_rows(record, layer, site)
    if rows is None:
        return None
    flat = memory.reshape(-1)
    a = _gather(flat, rows.a_offsets, in_features, dtype)
    b = _gather(flat, rows.b_offsets, out_features, dtype)
    return a, b.T.contiguous(), rows.scale


def gain_places(record: Tensor, layers: int) -> list[tuple[int, int]]:
    """(layer, site) of the layers' modules that have a gain row, in order."""
    every = ((layer, site) for layer in giving_way(range(layers)) for site in range(len(SITES)))
    found = ((place, site_rows(record, *place)) for place in every)
    return [place for place, rows in found if rows is not None and rows.gain_offset != NO_ROW]


def gain_row(memory: Tensor, record: Tensor, layer: int, site: int, out_features: int) -> Tensor:
    """View of a module's gain row: float32 [N]. Arguments as in `rows_of`."""
    rows = site_rows(record, layer, site)
    assert rows is not None and rows.gain_offset != NO_ROW
    at = rows.gain_offset
    return memory.reshape(-1)[at : at + out_features * ROW_DTYPE.itemsize].view(ROW_DTYPE)


def _gather(flat: Tensor, offsets: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    size = width * dtype.itemsize
    return torch.stack([flat[at : at + size].view(dtype) for at in offsets.tolist()])
