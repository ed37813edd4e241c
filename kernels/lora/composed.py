"""`LoraAdd` of the ops that it is made of."""

from torch import Tensor

from kernels.lora import LoraAdd, LoraBatch, LoraExpand, LoraShrink, LoraTarget


def lora_add_of(lora_shrink: LoraShrink, lora_expand_: LoraExpand) -> LoraAdd:
    """Return the composition."""

    def lora_add_(y: Tensor, x: Tensor, batch: LoraBatch, target: LoraTarget) -> None:
        lora_expand_(y, lora_shrink(x, batch, target), batch, target)

    return lora_add_


__all__ = ["lora_add_of"]
