"""LoRA deltas on CPU: one gather of rank-rows and one batched product a group of adapters.

The arena is seen as overlapping rows [places, width], one at every multiple of 16 bytes, so that a
plain `index_select` collects rank-rows from anywhere, whatever the strides inside a page.
"""

import torch
from torch import Tensor

from kernels.checks import check_expand, check_lora, check_segment_rows, check_sites
from kernels.lora import LoraSegments
from kernels.lora.batches import ROW_ALIGNMENT, RowGroup, StepBatches


def lora_shrink(
    x: Tensor,
    arena: Tensor,
    descriptors: Tensor,
    segments: LoraSegments,
    *,
    layer: int,
    sites: tuple[int, ...],
    num_sites: int,
) -> Tensor:
    """See `kernels.lora.LoraShrink`."""
    check_lora(x, "x", arena, descriptors, layer, num_sites)
    check_sites(sites, num_sites)
    return shrink(x, arena, step_batches(segments, descriptors), segments, layer, sites, num_sites)


def lora_expand_(
    y: Tensor,
    h: Tensor,
    arena: Tensor,
    descriptors: Tensor,
    segments: LoraSegments,
    *,
    layer: int,
    sites: tuple[int, ...],
    num_sites: int,
    spans: tuple[tuple[int, int], ...],
) -> None:
    """See `kernels.lora.LoraExpand`."""
    check_lora(y, "y", arena, descriptors, layer, num_sites)
    check_sites(sites, num_sites)
    check_expand(y, h, segments, sites, spans)
    batches = step_batches(segments, descriptors)
    expand_(y, h, arena, batches, layer, sites, num_sites, spans)


def step_batches(
    segments: LoraSegments, descriptors: Tensor, tile: int | None = None
) -> StepBatches:
    """Return the step's groups, made once a step and table of records."""
    key = (descriptors.data_ptr(), tile)
    found = segments.memo.get(key)
    if not isinstance(found, StepBatches):
        found = segments.memo[key] = StepBatches(segments, descriptors, tile)
    return found


def shrink(
    x: Tensor,
    arena: Tensor,
    batches: StepBatches,
    segments: LoraSegments,
    layer: int,
    sites: tuple[int, ...],
    num_sites: int,
    lanes: int = 1,
) -> Tensor:
    """Compute `lora_shrink`; rank-rows of a product are padded to a multiple of `lanes`."""
    check_segment_rows("x", x.shape[0], batches.total)
    h = torch.zeros(len(sites), x.shape[0], segments.max_rank)
    width = x.shape[1]
    if not width or not segments.max_rank:
        return h
    for group in batches.groups(layer, sites, num_sites):
        units = batches.units(group, 0, layer, sites, num_sites)
        a = _rank_rows(arena, _pad_columns(units, lanes), width, x.dtype)  # [I, R, K]
        rows = x[group.take].float().view(len(group.items), group.count, width)
        out = torch.bmm(rows, a.transpose(1, 2)).flatten(0, 1)  # [I * m, R]
        _scatter(h, out if group.keep is None else out[group.keep], group)
    return h


def expand_(
    y: Tensor,
    h: Tensor,
    arena: Tensor,
    batches: StepBatches,
    layer: int,
    sites: tuple[int, ...],
    num_sites: int,
    spans: tuple[tuple[int, int], ...],
) -> None:
    """Compute `lora_expand_`."""
    check_segment_rows("y", y.shape[0], batches.total)
    if not h.numel():
        return
    for group in batches.groups(layer, sites, num_sites):
        units = batches.units(group, 1, layer, sites, num_sites)
        shape = (len(group.items), group.count)
        scaled = h[:, group.take].view(h.shape[0], *shape, h.shape[2])
        scaled = scaled * batches.scales(group, layer, sites, num_sites)  # [sites, I, m, max_rank]
        column = 0
        for i, (rank, (start, width)) in enumerate(zip(group.ranks, spans, strict=True)):
            if rank and width:
                site_units = units[:, column : column + rank]
                b = _rank_rows(arena, site_units, width, y.dtype)  # [I, r, N]
                delta = torch.bmm(scaled[i, :, :, :rank], b).flatten(0, 1)  # [I * m, N]
                _add_rows(y[:, start : start + width], delta, group)
            column += rank


def _rank_rows(arena: Tensor, units: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Return float32 [I, R, width], the rank-rows that begin at these units."""
    elements = arena[: arena.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
    unit = ROW_ALIGNMENT // dtype.itemsize
    places = (elements.numel() - width) // unit + 1
    overlapping = elements.as_strided((places, width), (unit, 1), elements.storage_offset())
    rows = overlapping.index_select(0, units.flatten())
    return rows.float().view(*units.shape, width)


def _pad_columns(units: Tensor, lanes: int) -> Tensor:
    """Repeat the first rank-row of each item until their number is a multiple of `lanes`."""
    extra = -units.shape[1] % lanes
    return torch.cat((units, units[:, :1].expand(-1, extra)), dim=1) if extra else units


def _scatter(h: Tensor, out: Tensor, group: RowGroup) -> None:
    """Put out [rows, R] into the sites of h."""
    column = 0
    for i, rank in enumerate(group.ranks):
        if rank:
            h[i, group.rows, :rank] = out[:, column : column + rank]
        column += rank


def _add_rows(target: Tensor, delta: Tensor, group: RowGroup) -> None:
    """Add delta to the group's rows of target: float32 sum, one rounding."""
    delta = delta if group.keep is None else delta[group.keep]
    if isinstance(group.rows, slice) and target.dtype == torch.float32:
        target[group.rows] += delta
    else:
        target[group.rows] = (target[group.rows].float() + delta).to(target.dtype)


__all__ = ["expand_", "lora_expand_", "lora_shrink", "shrink", "step_batches"]
