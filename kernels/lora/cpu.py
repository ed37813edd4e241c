"""LoRA deltas on CPU: one gather of rank-rows and one batched product a group of adapters.

The arena is seen as overlapping rows [places, width], one at every multiple of 16 bytes, so that a
plain `index_select` collects rank-rows from anywhere, whatever the strides inside a page.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.checks import check_expand, check_lora_input, check_segment_rows
from kernels.lora import LoraBatch, LoraTarget
from kernels.lora.batches import LayerGroup, RowGroup, StepBatches, site_runs
from kernels.lora.composed import lora_add_of
from kernels.scratch import SCRATCH


def lora_shrink(x: Tensor, batch: LoraBatch, target: LoraTarget) -> Tensor:
    """See `kernels.lora.LoraShrink`."""
    check_lora_input(x)
    return shrink(x, batch, step_batches(batch), target)


def lora_expand_(y: Tensor, h: Tensor, batch: LoraBatch, target: LoraTarget) -> None:
    """See `kernels.lora.LoraExpand`."""
    check_expand(y, h, batch, target)
    expand_(y, h, batch, step_batches(batch), target)


lora_add_ = lora_add_of(lora_shrink, lora_expand_)


def step_batches(batch: LoraBatch, tile: int | None = None) -> StepBatches:
    """Return the step's groups, made once a step and table of records."""
    memo, key = batch.segments.memo, (batch.descriptors.data_ptr(), tile)
    found = memo.get(key)
    if not isinstance(found, StepBatches):
        found = memo[key] = StepBatches(batch, tile)
    return found


def shrink(
    x: Tensor, batch: LoraBatch, batches: StepBatches, target: LoraTarget, lanes: int = 1
) -> Tensor:
    """Compute `lora_shrink`; rank-rows of a product are padded to a multiple of `lanes`."""
    check_segment_rows("x", x.shape[0], batches.total)
    (rows, width), sites, max_rank = x.shape, target.sites, batch.segments.max_rank
    placed = batches.groups(target.layer, target.num_sites) if width and max_rank else []
    parts = [
        (each.group, _project(x, batch.arena, batches, each, units))
        for each in placed
        if (units := _site_units(each, sites, lanes)) is not None
    ]
    if len(parts) == 1 and _covers(*parts[0], sites, rows, max_rank):
        return parts[0][1].view(rows, len(sites), -1).transpose(0, 1)
    h = torch.zeros(len(sites), rows, max_rank)
    for group, out in parts:
        _scatter(h, out if group.keep is None else out[group.keep], group, sites)
    return h


def expand_(
    y: Tensor,
    h: Tensor,
    batch: LoraBatch,
    batches: StepBatches,
    target: LoraTarget,
    lanes: int = 1,
) -> None:
    """Compute `lora_expand_`; a product has at least `lanes` columns."""
    check_segment_rows("y", y.shape[0], batches.total)
    if not h.numel():
        return
    sites = target.sites
    for placed in batches.groups(target.layer, target.num_sites):
        group, items = placed.group, len(placed.group.items)
        scaled = h[:, group.take].view(len(sites), items, group.count, h.shape[2])
        scaled = scaled * placed.scales[_selector(sites)]  # [sites, I, m, max_rank]
        for run in site_runs(group, sites, target.spans):
            count, rank, width = run.sites.stop - run.sites.start, run.rank, run.width
            units = placed.b[run.columns.start * items : run.columns.stop * items]
            b = _rank_rows(batch.arena, batches, units, width, y.dtype).view(-1, rank, width)
            left = scaled[run.sites, :, :, :rank].reshape(-1, group.count, rank)
            if width < lanes:
                b = pad(b, (0, lanes - width))
            delta = torch.bmm(left, b)[..., :width].reshape(count, -1, width)
            delta = delta.transpose(0, 1)  # [I * m, n, width]
            written = y[:, run.start : run.start + count * width].view(-1, count, width)
            _add_rows(written, delta, group)


def _project(
    x: Tensor, arena: Tensor, batches: StepBatches, placed: LayerGroup, units: Tensor
) -> Tensor:
    """Return float32 [I * m, R]: the group's rows times their rank-rows at units [R, I]."""
    width, count = x.shape[1], placed.group.count
    a = _rank_rows(arena, batches, units, width, x.dtype).view(*units.shape, width)
    rows = x[placed.group.take].float().view(-1, count, width)
    return torch.bmm(rows, a.permute(1, 2, 0)).flatten(0, 1)


def _covers(group: RowGroup, out: Tensor, sites: tuple[int, ...], rows: int, max_rank: int) -> bool:
    """Whether a product is all of h, but for the order of its dimensions."""
    return (
        group.keep is None
        and group.rows == slice(0, rows)
        and out.shape[1] == len(sites) * max_rank
        and all(group.ranks[site] == max_rank for site in sites)
    )


def _site_units(placed: LayerGroup, sites: tuple[int, ...], lanes: int) -> Tensor | None:
    """Return int64 [R, I], the rank-rows of A at these sites; None: there are none.

    The first is repeated until their number is a multiple of `lanes`.
    """
    starts = placed.group.starts
    if isinstance(_selector(sites), slice):
        units = placed.a[starts[sites[0]] : starts[sites[-1] + 1]] if sites else placed.a[:0]
    else:
        units = torch.cat([placed.a[starts[site] : starts[site + 1]] for site in sites])
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
    """Return float32 [units, width], the rank-rows there; valid until the next call."""
    rows = SCRATCH.take("rank-rows", units.numel(), width, dtype)
    torch.index_select(batches.places(arena, width, dtype), 0, units.view(-1), out=rows)
    return rows.float()


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


__all__ = ["expand_", "lora_add_", "lora_expand_", "lora_shrink", "shrink", "step_batches"]
