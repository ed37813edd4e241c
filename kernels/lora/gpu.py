"""LoRA deltas on CUDA: one shrink and one expand launch for up to three sites of a projection.

Nothing is read back from the device, and the grids depend on shapes, `max_rows` and `max_rank`
alone: both ops can be captured into a CUDA graph, whose steps may then have fewer segments, the
rest being empty, and any ranks and rows within these bounds.

Launches overlap with the one before them (programmatic dependent launch) and read segments,
records and adapters early: what writes those must not be the very last launch before a shrink.
"""

import math
from typing import Any

import torch
import triton
from torch import Tensor

from kernels.checks import check_expand, check_lora, check_sites, reject
from kernels.lora import LoraSegments, decode, prefill
from kernels.lora.launches import (
    PRECISION,
    SITES_PER_LAUNCH,
    launch_options,
    launches,
    padded,
    row_grid,
)
from kernels.lora.plans import MANY_ROWS, ExpandPlan, ShrinkPlan, plan_expand, plan_shrink
from kernels.lora.prefill_plans import PrefillExpandPlan, PrefillShrinkPlan
from kernels.lora.triton_expand import expand_kernel
from kernels.lora.triton_shrink import shrink_kernel

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def lora_shrink(
    x: Tensor,
    arena: Tensor,
    descriptors: Tensor,
    segments: LoraSegments,
    *,
    layer: int,
    sites: tuple[int, ...],
    num_sites: int,
    plan: ShrinkPlan | PrefillShrinkPlan | None = None,
) -> Tensor:
    """See `kernels.lora.LoraShrink`; returns h in parts. Ranks above max_rank read as 0."""
    check_lora(x, "x", arena, descriptors, layer, num_sites)
    check_sites(sites, num_sites)
    _check_dtype(x, "x")
    rows, width = x.shape
    if not (rows and segments.max_rank and sites and len(segments.descriptors)):
        return x.new_zeros((len(sites), rows, segments.max_rank), dtype=torch.float32)
    x = x if x.stride(1) == 1 else x.contiguous()
    if isinstance(plan, PrefillShrinkPlan) or (plan is None and rows >= MANY_ROWS):
        where: Any = {"layer": layer, "sites": sites, "num_sites": num_sites}
        return prefill.shrink(x, arena, descriptors, segments, **where, plan=plan)
    together = min(len(sites), SITES_PER_LAUNCH)
    plan = plan or plan_shrink(rows, segments, together, width, x.dtype)
    shape = (plan.parts(width), len(sites), rows, segments.max_rank)
    h = torch.empty(shape, dtype=torch.float32, device=x.device)
    tiles, row_tiles, block_segments = row_grid(segments, rows, plan.block_rows)
    for at in launches(len(sites)):
        heads = [2 * (layer * num_sites + site) for site in sites[at]]
        rank_rows = len(heads) * segments.max_rank
        shrink_kernel[(shape[0], tiles, triton.cdiv(rank_rows, plan.block_ranks))](
            x,
            h[:, at],
            arena,
            descriptors,
            segments.offsets,
            segments.descriptors,
            len(segments.descriptors),
            row_tiles,
            segments.max_rank,
            width,
            x.stride(0),
            h.stride(0),
            h.stride(1),
            *padded(heads),
            SITES=len(heads),
            BLOCK_SEGMENTS=block_segments,
            BLOCK_ROWS=plan.block_rows,
            BLOCK_RANKS=plan.block_ranks,
            BLOCK_K=plan.block_k,
            ITEM=x.element_size(),
            PRECISION="ieee",
            USE_DOT=plan.dot,
            num_stages=1,
            **launch_options(x.device, plan.warps),
        )
    return h


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
    plan: ExpandPlan | PrefillExpandPlan | None = None,
) -> None:
    """See `kernels.lora.LoraExpand`; y's rows must be contiguous."""
    check_lora(y, "y", arena, descriptors, layer, num_sites)
    check_sites(sites, num_sites)
    parts = h if h.ndim == 4 else h[None]  # [P, sites, T, max_rank]
    check_expand(y, parts[0], segments, sites, spans)
    _check_dtype(y, "y")
    if y.numel() and y.stride(1) != 1:
        reject("y", "of contiguous rows", y)
    if not (h.numel() and len(segments.descriptors)):
        return
    rows = y.shape[0]
    if isinstance(plan, PrefillExpandPlan) or (plan is None and rows >= MANY_ROWS):
        where: Any = {"layer": layer, "sites": sites, "num_sites": num_sites, "spans": spans}
        prefill.expand_(y, parts, arena, descriptors, segments, **where, plan=plan)
        return
    for at in launches(len(sites)):
        if any(size for _, size in spans[at]):
            heads = [2 * (layer * num_sites + site) for site in sites[at]]
            _launch_expand(y, parts[:, at], arena, descriptors, segments, heads, spans[at], plan)


def _launch_expand(
    y: Tensor,
    parts: Tensor,
    arena: Tensor,
    descriptors: Tensor,
    segments: LoraSegments,
    heads: list[int],
    spans: tuple[tuple[int, int], ...],
    plan: ExpandPlan | None,
) -> None:
    """Launch once, for up to three sites, whose heads are words of a record."""
    rows = y.shape[0]
    starts, widths = zip(*spans, strict=True)
    chosen = plan or plan_expand(rows, segments, max(widths), y.dtype)
    tiles, row_tiles, block_segments = row_grid(segments, rows, chosen.block_rows)
    vector = math.gcd(16, *starts, *widths)
    columns = sum(triton.cdiv(width, chosen.block_columns) for width in widths)
    expand_kernel[(columns, tiles)](
        y,
        parts,
        arena,
        descriptors,
        segments.offsets,
        segments.descriptors,
        len(segments.descriptors),
        row_tiles,
        segments.max_rank,
        y.stride(0),
        parts.stride(0),
        parts.stride(1),
        *padded(heads),
        *padded([start // vector for start in starts]),
        *padded([width // vector for width in widths]),
        SITES=len(heads),
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


def lora_add_(
    y: Tensor,
    x: Tensor,
    arena: Tensor,
    descriptors: Tensor,
    segments: LoraSegments,
    *,
    layer: int,
    sites: tuple[int, ...],
    num_sites: int,
    spans: tuple[tuple[int, int], ...],
) -> None:
    """See `kernels.lora.LoraAdd`; one launch if tiles are known and rows fewer than `MANY_ROWS`."""
    where: Any = {"layer": layer, "sites": sites, "num_sites": num_sites}
    memory = (arena, descriptors, segments)
    if segments.tiles is not None and x.shape[0] < MANY_ROWS:
        decode.add_(y, x, *memory, **where, spans=spans)
    else:
        h = lora_shrink(x, *memory, **where)
        lora_expand_(y, h, *memory, **where, spans=spans)


def _check_dtype(rows: Tensor, name: str) -> None:
    if rows.dtype not in DTYPES:
        reject(name, f"of dtype {', '.join(map(str, DTYPES))}", rows)


__all__ = ["lora_add_", "lora_expand_", "lora_shrink"]
