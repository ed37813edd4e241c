"""LoRA deltas on CUDA: one shrink and one expand launch for up to three sites of a projection.

Nothing is read back from the device, and the grids depend on shapes, `max_rows` and `max_rank`
alone: both ops can be captured into a CUDA graph, whose steps may then have fewer segments, the
rest being empty, and any ranks and rows within these bounds.

Launches overlap with the one before them (programmatic dependent launch) and read segments,
records and adapters early: what writes those must not be the very last launch before a shrink.
"""

import torch
import triton
from torch import Tensor

from kernels.checks import check_dtype, check_expand, check_lined, check_lora_input
from kernels.lora import LoraBatch, LoraTarget, decode, prefill
from kernels.lora.launches import (
    PRECISION,
    SITES_PER_LAUNCH,
    launch_options,
    launches,
    padded,
    row_grid,
    unit_spans,
)
from kernels.lora.plans import MANY_ROWS, ExpandPlan, ShrinkPlan, plan_expand, plan_shrink
from kernels.lora.prefill_plans import PrefillExpandPlan, PrefillShrinkPlan
from kernels.lora.triton_expand import expand_kernel
from kernels.lora.triton_shrink import shrink_kernel
from kernels.sizes import lined


def lora_shrink(
    x: Tensor,
    batch: LoraBatch,
    target: LoraTarget,
    *,
    plan: ShrinkPlan | PrefillShrinkPlan | None = None,
) -> Tensor:
    """See `kernels.lora.LoraShrink`; returns h in parts. Ranks above max_rank read as 0."""
    check_lora_input(x)
    check_dtype("x", x)
    segments, sites, (rows, width) = batch.segments, len(target.sites), x.shape
    if not (rows and segments.max_rank and sites and len(segments.descriptors)):
        return x.new_zeros((sites, rows, segments.max_rank), dtype=torch.float32)
    x = lined(x)
    if isinstance(plan, PrefillShrinkPlan) or (plan is None and rows >= MANY_ROWS):
        return prefill.shrink(x, batch, target, plan=plan)
    plan = plan or plan_shrink(rows, segments, min(sites, SITES_PER_LAUNCH), width, x.dtype)
    shape = (plan.parts(width), sites, rows, segments.max_rank)
    h = torch.empty(shape, dtype=torch.float32, device=x.device)
    tiles, row_tiles, block_segments = row_grid(segments, rows, plan.block_rows)
    for at, launch in launches(target):
        rank_rows = len(launch.sites) * segments.max_rank
        shrink_kernel[(shape[0], tiles, triton.cdiv(rank_rows, plan.block_ranks))](
            x,
            h[:, at],
            batch.arena,
            batch.descriptors,
            segments.offsets,
            segments.descriptors,
            len(segments.descriptors),
            row_tiles,
            segments.max_rank,
            width,
            x.stride(0),
            h.stride(0),
            h.stride(1),
            *padded(launch.heads),
            SITES=len(launch.sites),
            BLOCK_SEGMENTS=block_segments,
            BLOCK_ROWS=plan.block_rows,
            BLOCK_RANKS=plan.block_ranks,
            BLOCK_K=plan.block_k,
            ITEM=x.element_size(),
            USE_DOT=plan.dot,
            num_stages=1,
            **launch_options(x.device, plan.warps),
        )
    return h


def lora_expand_(
    y: Tensor,
    h: Tensor,
    batch: LoraBatch,
    target: LoraTarget,
    *,
    plan: ExpandPlan | PrefillExpandPlan | None = None,
) -> None:
    """See `kernels.lora.LoraExpand`; y's rows must be contiguous."""
    parts = h if h.ndim == 4 else h[None]  # [P, sites, T, max_rank]
    check_expand(y, parts[0], batch, target)
    check_dtype("y", y)
    check_lined("y", y)
    if not (h.numel() and len(batch.segments.descriptors)):
        return
    if isinstance(plan, PrefillExpandPlan) or (plan is None and y.shape[0] >= MANY_ROWS):
        prefill.expand_(y, parts, batch, target, plan=plan)
        return
    for at, launch in launches(target):
        if any(width for _, width in launch.spans):
            _launch_expand(y, parts[:, at], batch, launch, plan)


def _launch_expand(
    y: Tensor, parts: Tensor, batch: LoraBatch, launch: LoraTarget, plan: ExpandPlan | None
) -> None:
    """Launch once, for up to three sites."""
    rows, segments = y.shape[0], batch.segments
    widths = [width for _, width in launch.spans]
    chosen = plan or plan_expand(rows, segments, max(widths), y.dtype)
    tiles, row_tiles, block_segments = row_grid(segments, rows, chosen.block_rows)
    vector, spans = unit_spans(launch)
    columns = sum(triton.cdiv(width, chosen.block_columns) for width in widths)
    expand_kernel[(columns, tiles)](
        y,
        parts,
        batch.arena,
        batch.descriptors,
        segments.offsets,
        segments.descriptors,
        len(segments.descriptors),
        row_tiles,
        segments.max_rank,
        y.stride(0),
        parts.stride(0),
        parts.stride(1),
        *padded(launch.heads),
        *spans,
        SITES=len(launch.sites),
        PARTS=parts.shape[0],
        BLOCK_SEGMENTS=block_segments,
        BLOCK_ROWS=chosen.block_rows,
        BLOCK_RANKS=chosen.block_ranks,
        BLOCK_N=chosen.block_columns,
        VECTOR=vector,
        ITEM=y.element_size(),
        PRECISION=PRECISION[y.dtype],
        USE_DOT=chosen.dot,
        USE_TURNS=segments.max_rank > chosen.block_ranks,
        num_stages=1,
        **launch_options(y.device, chosen.warps),
    )


def lora_add_(y: Tensor, x: Tensor, batch: LoraBatch, target: LoraTarget) -> None:
    """See `kernels.lora.LoraAdd`; one launch if tiles are known and rows fewer than `MANY_ROWS`."""
    if batch.segments.tiles is not None and x.shape[0] < MANY_ROWS:
        decode.add_(y, x, batch, target)
    else:
        lora_expand_(y, lora_shrink(x, batch, target), batch, target)


__all__ = ["lora_add_", "lora_expand_", "lora_shrink"]
