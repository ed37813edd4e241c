"""LoRA deltas on CPU with one shape of product for an adapter, whatever else is in the step.

Segments are cut into tiles of `ROWS` rows, padded; a product never mixes ranks, and the batch
dimension of a batched product doesn't change the order of a sum.
"""

from torch import Tensor

from kernels.checks import check_expand, check_lora_input
from kernels.lora import LoraBatch, LoraTarget
from kernels.lora.composed import lora_add_of
from kernels.lora.cpu import expand_, shrink, step_batches

ROWS = 8
_LANES = 16  # fewer columns than a vector holds would be summed in another order


def lora_shrink(x: Tensor, batch: LoraBatch, target: LoraTarget) -> Tensor:
    """See `kernels.lora.LoraShrink`; a row's bits don't depend on T, its place, or other rows."""
    check_lora_input(x)
    return shrink(x, batch, step_batches(batch, ROWS), target, _LANES)


def lora_expand_(y: Tensor, h: Tensor, batch: LoraBatch, target: LoraTarget) -> None:
    """See `kernels.lora.LoraExpand`; a row's bits don't depend on T, its place, or other rows."""
    check_expand(y, h, batch, target)
    expand_(y, h, batch, step_batches(batch, ROWS), target, _LANES)


lora_add_ = lora_add_of(lora_shrink, lora_expand_)

__all__ = ["lora_add_", "lora_expand_", "lora_shrink"]
