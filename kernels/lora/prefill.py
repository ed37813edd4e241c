"""LoRA deltas of steps of many rows: x and y stream by, once, and the adapters stay in the cache.

The arguments are as `kernels.lora` says, and have been checked.
"""

import torch
import triton
from torch import Tensor

from kernels.lora import LoraBatch, LoraTarget
from kernels.lora.launches import (
    PRECISION,
    SITES_PER_LAUNCH,
    launch_options,
    launches,
    padded,
    row_grid,
    segment_block,
    unit_spans,
)
from kernels.lora.prefill_plans import (
    PrefillExpandPlan,
    PrefillShrinkPlan,
    plan_expand,
    plan_shrink,
    plan_silu,
)
from kernels.lora.triton_prefill_expand import prefill_expand_kernel
from kernels.lora.triton_prefill_shrink import prefill_shrink_kernel
from kernels.lora.triton_prefill_silu import prefill_silu_kernel


def shrink(
    x: Tensor, batch: LoraBatch, target: LoraTarget, *, plan: PrefillShrinkPlan | None = None
) -> Tensor:
    """See `kernels.lora.LoraShrink`; returns h in parts."""
    segments, sites, (rows, width) = batch.segments, len(target.sites), x.shape
    together = min(sites, SITES_PER_LAUNCH)
    plan = plan or plan_shrink(rows, together, segments.max_rank, width, x.dtype)
    blocks = triton.cdiv(width, plan.block_k)
    steps = max(1, triton.cdiv(blocks, plan.parts))
    shape = (max(1, triton.cdiv(blocks, steps)), sites, rows, segments.max_rank)
    h = torch.empty(shape, dtype=torch.float32, device=x.device)
    tiles, row_tiles, block_segments = row_grid(segments, rows, plan.block_rows)
    for at, launch in launches(target):
        rank_blocks = triton.cdiv(len(launch.sites) * segments.max_rank, plan.block_ranks)
        prefill_shrink_kernel[(rank_blocks, shape[0], tiles)](
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
            steps,
            SITES=len(launch.sites),
            BLOCK_SEGMENTS=block_segments,
            BLOCK_ROWS=plan.block_rows,
            BLOCK_RANKS=plan.block_ranks,
            BLOCK_K=plan.block_k,
            STAGES=plan.stages,
            ITEM=x.element_size(),
            EVEN=width % plan.block_k == 0,
            **launch_options(x.device, plan.warps),
        )
    return h


def expand_(
    y: Tensor,
    parts: Tensor,
    batch: LoraBatch,
    target: LoraTarget,
    *,
    plan: PrefillExpandPlan | None = None,
) -> None:
    """See `kernels.lora.LoraExpand`; h comes in parts."""
    rows, segments = y.shape[0], batch.segments
    for at, launch in launches(target):
        widths = [width for _, width in launch.spans]
        if not any(widths):
            continue
        chosen = plan or plan_expand(rows, segments.max_rank, max(widths), y.dtype)
        tiles, row_tiles, block_segments = row_grid(segments, rows, chosen.block_rows)
        vector, spans = unit_spans(launch)
        chunks = sum(triton.cdiv(width, chosen.columns) for width in widths)
        prefill_expand_kernel[(chunks, tiles)](
            y,
            parts[:, at],
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
            CHUNK=chosen.columns,
            WARPS=chosen.warps,
            STAGES=chosen.stages,
            VECTOR=vector,
            ITEM=y.element_size(),
            PRECISION=PRECISION[y.dtype],
            EVEN=all(width % chosen.block_columns == 0 for width in widths),
            USE_TURNS=segments.max_rank > chosen.block_ranks,
            num_stages=1,  # of the loop over turns
            **launch_options(y.device, chosen.warps),
        )


def silu_mul(
    gate_up: Tensor,
    parts: Tensor,
    batch: LoraBatch,
    target: LoraTarget,
    down: LoraTarget,
    *,
    plan: PrefillExpandPlan | None = None,
) -> tuple[Tensor, Tensor]:
    """See `kernels.lora.LoraSiluMul`; h comes and goes in parts. max_rank is at most MAX_FUSED."""
    rows, width, segments = gate_up.shape[0], gate_up.shape[1] // 2, batch.segments
    plan = plan or plan_silu(segments.max_rank)
    count, chunks = len(segments.descriptors), triton.cdiv(width, plan.columns)
    out = gate_up.new_empty((rows, width))
    h_down = parts.new_empty((chunks, 1, rows, segments.max_rank))
    prefill_silu_kernel[(chunks, count + rows // plan.block_rows)](
        gate_up,
        parts,
        out,
        h_down,
        batch.arena,
        batch.descriptors,
        segments.offsets,
        segments.descriptors,
        count,
        segments.max_rank,
        width,
        gate_up.stride(0),
        parts.stride(0),
        parts.stride(1),
        h_down.stride(0),
        *target.heads,
        *down.heads,
        PARTS=parts.shape[0],
        BLOCK_SEGMENTS=segment_block(count),
        BLOCK_ROWS=plan.block_rows,
        BLOCK_RANKS=plan.block_ranks,
        BLOCK_N=plan.block_columns,
        CHUNK=plan.columns,
        WARPS=plan.warps,
        STAGES=plan.stages,
        ITEM=gate_up.element_size(),
        PRECISION=PRECISION[gate_up.dtype],
        EVEN=width % plan.block_columns == 0,
        num_stages=1,
        **launch_options(gate_up.device, plan.warps),
    )
    return out, h_down


__all__ = ["expand_", "shrink", "silu_mul"]
