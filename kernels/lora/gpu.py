"""LoRA deltas on CUDA: one launch for up to three sites of a projection where tiles of few rows are
known, else one shrink and one expand launch.

Nothing is read back from the device, and the grids depend on shapes, `max_rows` and `max_rank`
alone: all ops can be captured into a CUDA graph, whose steps may then have fewer segments, the
rest being empty, and any ranks and rows within these bounds.

Launches overlap with the one before them (programmatic dependent launch) and read segments,
records and adapters early: what writes those must not be the very last launch before a shrink.
"""

import torch
from torch import Tensor

from kernels.checks import check_dtype, check_expand, check_lined, check_lora_input
from kernels.lora import LoraBatch, LoraTarget, decode, prefill
from kernels.lora.plans import MANY_ROWS
from kernels.lora.prefill_plans import PrefillExpandPlan, PrefillShrinkPlan
from kernels.sizes import lined


def lora_shrink(
    x: Tensor, batch: LoraBatch, target: LoraTarget, *, plan: PrefillShrinkPlan | None = None
) -> Tensor:
    """See `kernels.lora.LoraShrink`; returns h in parts. Ranks above max_rank read as 0."""
    check_lora_input(x)
    check_dtype("x", x)
    segments, sites, rows = batch.segments, len(target.sites), x.shape[0]
    if not (rows and segments.max_rank and sites and len(segments.descriptors)):
        return x.new_zeros((sites, rows, segments.max_rank), dtype=torch.float32)
    return prefill.shrink(lined(x), batch, target, plan=plan)


def lora_expand_(
    y: Tensor,
    h: Tensor,
    batch: LoraBatch,
    target: LoraTarget,
    *,
    plan: PrefillExpandPlan | None = None,
) -> None:
    """See `kernels.lora.LoraExpand`; y's rows must be contiguous."""
    parts = h if h.ndim == 4 else h[None]  # [P, sites, T, max_rank]
    check_expand(y, parts[0], batch, target)
    check_dtype("y", y)
    check_lined("y", y)
    if h.numel() and len(batch.segments.descriptors):
        prefill.expand_(y, parts, batch, target, plan=plan)


def lora_add_(y: Tensor, x: Tensor, batch: LoraBatch, target: LoraTarget) -> None:
    """See `kernels.lora.LoraAdd`; one launch if tiles are known and rows fewer than `MANY_ROWS`."""
    if batch.segments.tiles is not None and x.shape[0] < MANY_ROWS:
        decode.add_(y, x, batch, target)
    else:
        lora_expand_(y, lora_shrink(x, batch, target), batch, target)


__all__ = ["lora_add_", "lora_expand_", "lora_shrink"]
