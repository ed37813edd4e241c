"""LoRA deltas on CPU: one gather of rank-rows and one batched product a group of adapters.

The arena is seen as overlapping rows [places, width], one at every multiple of 16 bytes, so that a
plain `index_select` collects rank-rows from anywhere, whatever the strides inside a page.
"""

from itertools import pairwise

import torch
from torch import Tensor

from kernels.checks import check_expand, check_lora, check_segment_rows, check_sites
from kernels.lora import LoraSegments
from kernels.lora.batches import LayerGroup, RowGroup, StepBatches
from kernels.scratch import SCRATCH


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
    if not x.shape[1] or not segments.max_rank:
        return h
    for placed in batches.groups(layer, num_sites):
        group = placed.group
        units = _site_units(placed, sites, lanes)
        if units is not None:
            a = _rank_rows(arena, batches, units, x.shape[1], x.dtype)  # [I, R, K]
            rows = x[group.take].float().view(-1, group.count, x.shape[1])
            out = torch.bmm(rows, a.transpose(1, 2)).flatten(0, 1)  # [I * m, R]
            _scatter(h, out if group.keep is None else out[group.keep], group, sites)
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
    for placed in batches.groups(layer, num_sites):
        group = placed.group
        scaled = h[:, group.take].view(len(sites), -1, group.count, h.shape[2])
        scaled = scaled * placed.scales[_selector(sites)]  # [sites, I, m, max_rank]
        for i, (site, (start, width)) in enumerate(zip(sites, spans, strict=True)):
            rank = group.ranks[site]
            if rank and width:
                units = placed.units[group.columns(1, site)]
                b = _rank_rows(arena, batches, units, width, y.dtype)  # [I, r, N]
                delta = torch.bmm(scaled[i, :, :, :rank], b).flatten(0, 1)  # [I * m, N]
                _add_rows(y[:, start : start + width], delta, group)


def _site_units(placed: LayerGroup, sites: tuple[int, ...], lanes: int) -> Tensor | None:
    """Return int64 [R, I], the rank-rows of A at these sites; None: there are none.

    The first is repeated until their number is a multiple of `lanes`.
    """
    parts = [placed.group.columns(0, site) for site in sites]
    if all(a.stop == b.start for a, b in pairwise(parts)):
        units = placed.units[parts[0].start : parts[-1].stop]
    else:
        units = torch.cat([placed.units[part] for part in parts])
    if not units.shape[0]:
        return None
    extra = -units.shape[0] % lanes
    return torch.cat((units, units[:1].expand(extra, -1))) if extra else units


def _selector(sites: tuple[int, ...]) -> slice | list[int]:
    """A slice where sites follow each other (a view, no copy), else a list."""
    run = range(sites[0], sites[0] + len(sites)) if sites else range(0)
    return slice(run.start, run.stop) if tuple(run) == sites else list(sites)


def _rank_rows(
    arena: Tensor, batches: StepBatches, units: Tensor, width: int, dtype: torch.dtype
) -> Tensor:
    """Return float32 [I, R, width], the rank-rows at units [R, I]; valid until the next call."""
    rows = SCRATCH.take("rank-rows", units.numel(), width, dtype)
    torch.index_select(batches.places(arena, width, dtype), 0, units.view(-1), out=rows)
    return rows.float().view(*units.shape, width).transpose(0, 1)


def _scatter(h: Tensor, out: Tensor, group: RowGroup, sites: tuple[int, ...]) -> None:
    """Put out [rows, R] into the sites of h."""
    column = 0
    for i, site in enumerate(sites):
        rank = group.ranks[site]
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
