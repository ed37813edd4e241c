"""The gated activation on CUDA with the deltas on both sides of it."""

import torch
from torch import Tensor

from kernels.checks import check_gate_up, reject
from kernels.lora import LoraBatch, LoraSegments, LoraTarget, prefill
from kernels.lora.gpu import lora_shrink
from kernels.lora.plans import MANY_ROWS
from kernels.lora.prefill_plans import MAX_FUSED


def lora_silu_mul(
    gate_up: Tensor, x: Tensor, batch: LoraBatch, target: LoraTarget, down: LoraTarget
) -> tuple[Tensor, Tensor] | None:
    """See `kernels.lora.LoraSiluMul`; one launch beside the shrink, where rows are many.

    Gate and up pass once instead of three times, and the product once instead of twice.
    """
    check_gate_up(gate_up)
    if gate_up.dtype != x.dtype or gate_up.shape[0] != x.shape[0]:
        reject("gate_up", f"{x.dtype} [{x.shape[0]}, 2 * I] as x", gate_up)
    half = gate_up.shape[1] // 2
    if target.spans != ((0, half), (half, half)):
        raise ValueError(f"target must be gate's and up's halves of gate_up, got {target}")
    if len(down.sites) != 1:
        raise ValueError(f"down must be of one site, got {down}")
    if not _fits(gate_up, batch.segments):
        return None
    return prefill.silu_mul(gate_up, lora_shrink(x, batch, target), batch, target, down)


def _fits(gate_up: Tensor, segments: LoraSegments) -> bool:
    """Whether the launch is there for it, and pays."""
    rows, columns = gate_up.shape
    return (
        rows >= MANY_ROWS
        and columns > 0
        and gate_up.stride(1) == 1
        and gate_up.dtype in (torch.bfloat16, torch.float16)
        and len(segments.descriptors) > 0
        and 0 < segments.max_rank <= MAX_FUSED
    )


__all__ = ["lora_silu_mul"]
