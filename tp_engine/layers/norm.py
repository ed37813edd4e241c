"""The end of a block: its ranks' parts become one sum, which is added to the residual and normed.

Legend: T rows of a step, H hidden size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from kernels.dispatch import Ops

if TYPE_CHECKING:
    from tp_engine.comm import Comm

__all__ = ["sum_add_norm"]


def sum_add_norm(
    part: Tensor, residual: Tensor, weight: Tensor, eps: float, *, ops: Ops, comm: Comm
) -> tuple[Tensor, Tensor]:
    """part [T, H] of this rank, residual [T, H] -> the normed total and the total, equal on all
    ranks."""
    boxes = comm.mailboxes
    if boxes is not None and weight.dtype == part.dtype and boxes.hold_rows(part):
        from kernels.reduce.gpu import sum_add_rms_norm  # Triton is not on every platform

        return sum_add_rms_norm(part, residual, weight, eps, boxes)
    return ops.add_rms_norm(comm.all_reduce(part), residual, weight, eps)
