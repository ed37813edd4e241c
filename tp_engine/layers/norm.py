"""The end of a block: its ranks' parts become one sum, which is added to the residual and normed.

Legend: T rows of a step, H hidden size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from kernels.dispatch import Ops
from tp_engine.layers.lora import Projected

if TYPE_CHECKING:
    from tp_engine.ranks.comm import Comm

__all__ = ["sum_add_norm"]


def sum_add_norm(
    part: Projected, residual: Tensor, weight: Tensor, eps: float, *, ops: Ops, comm: Comm
) -> tuple[Tensor, Tensor]:
    """part [T, H] of this rank, residual [T, H] -> the normed total and the total, equal on all
    ranks."""
    if comm.world == 1:
        return ops.add_rms_norm(comm.all_reduce(part.base), residual, weight, eps, part.delta)
    own, boxes = part.total(), comm.mailboxes
    if boxes is not None and weight.dtype == own.dtype and boxes.hold_rows(own):
        from kernels.reduce.gpu import sum_add_rms_norm  # Triton is not on every platform

        return sum_add_rms_norm(own, residual, weight, eps, boxes)
    return ops.add_rms_norm(comm.all_reduce(own), residual, weight, eps)
