"""Rows on their way into pages: cast once, then copied to their places."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tp_engine.adapters.errors import AdapterError
from tp_engine.adapters.layout import Run
from tp_engine.adapters.tensors import all_finite


def cast_finite(what: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor in another dtype; rounding is expected, overflow is not.

    Args:
        what: its name for people.

    Raises:
        AdapterError: ``not_finite``.
    """
    cast = tensor.to(dtype)
    if tensor.dtype != dtype and not all_finite(cast):
        largest = float(tensor.abs().max())
        reason = f"{what} has a value of magnitude {largest:g}, too large for {dtype}"
        raise AdapterError("not_finite", reason)
    return cast


def copy_rows(rows: Tensor, runs: Sequence[Run], pages: Tensor) -> Tensor:
    """Copy [r, width] to its places, one copy a run; the byte offsets int64 [r] of the rows.

    Rows without width have no run, and offset 0.
    """
    offsets = torch.zeros(rows.shape[0], dtype=torch.int64)
    for run in runs:
        start, stop = run.first, run.first + run.count
        row_bytes, stride = run.group.row_bytes, run.group.stride
        at = run.page * pages.shape[1] + run.offset
        target = pages.view(-1).as_strided((run.count, row_bytes), (stride, 1), at)
        target.copy_(rows[start:stop].contiguous().view(torch.uint8))
        offsets[start:stop] = at + stride * torch.arange(run.count)
    return offsets
