"""The sum over ranks, the truth for the Triton kernel."""

from collections.abc import Sequence

import torch
from torch import Tensor


def sum_in_order(parts: Sequence[Tensor]) -> Tensor:
    """Add the ranks' parts in rank order, in float32, and round once.

    Args:
        parts: of all ranks, one shape and dtype; the first one may be overwritten.
    """
    total = parts[0].to(torch.float32)
    for part in parts[1:]:
        total += part
    return total.to(parts[0].dtype)


__all__ = ["sum_in_order"]
