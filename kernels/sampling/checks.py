"""Argument checks that the implementations of sampling share."""

import torch
from torch import Tensor

from kernels.checks import reject
from kernels.sampling import DrawParams, Penalties

MAX_WIDTH = 128
"""Most candidates a row."""


def check_logits(logits: Tensor) -> None:
    """Check rows of logits."""
    if logits.ndim != 2 or not logits.is_floating_point():
        reject("logits", "floating point [R, V]", logits)


def check_slots(logits: Tensor, slots: Tensor, last_token: Tensor) -> None:
    """Check what `greedy` has beyond the logits."""
    rows = logits.shape[0]
    if slots.shape != (rows,) or slots.dtype != torch.int64:
        reject("slots", f"int64 [{rows}]", slots)
    if last_token.ndim != 1 or last_token.dtype != torch.int64:
        reject("last_token", "int64 [S]", last_token)


def check_width(width: int) -> None:
    """Check the number of candidates."""
    if not 1 <= width <= MAX_WIDTH:
        raise ValueError(f"width must be in 1 .. {MAX_WIDTH}, got {width}")


def check_rows(rows: Tensor) -> None:
    """Check numbers of rows."""
    if rows.ndim != 1 or rows.dtype != torch.int64:
        reject("rows", "int64 [n]", rows)


def check_penalise(
    logits: Tensor, prompt_seen: Tensor, output_counts: Tensor, penalties: Penalties
) -> None:
    """Check the arguments of `penalise`."""
    check_logits(logits)
    if logits.dtype != torch.float32:
        reject("logits", "float32 [R, V]", logits)
    columns, count = logits.shape[1], penalties.rows.shape[0]
    if prompt_seen.shape[1:] != (columns,) or prompt_seen.dtype != torch.bool:
        reject("prompt_seen", f"bool [S, {columns}]", prompt_seen)
    if output_counts.shape != prompt_seen.shape or output_counts.dtype != torch.int32:
        reject("output_counts", f"int32 {tuple(prompt_seen.shape)}", output_counts)
    for name, tensor in (("rows", penalties.rows), ("slots", penalties.slots)):
        if tensor.shape != (count,) or tensor.dtype != torch.int64:
            reject(f"penalties.{name}", f"int64 [{count}]", tensor)
    if penalties.factors.shape != (3, count) or penalties.factors.dtype != torch.float32:
        reject("penalties.factors", f"float32 [3, {count}]", penalties.factors)


def check_draw(logits: Tensor, rows: Tensor, top: Tensor, params: DrawParams) -> None:
    """Check the arguments of `draw`."""
    check_logits(logits)
    check_rows(rows)
    count = rows.shape[0]
    if top.shape != (count,) or top.dtype != torch.float32:
        reject("top", f"float32 [{count}]", top)
    for name in DrawParams.__dataclass_fields__:
        dtype = torch.int64 if name == "top_k" else torch.float64
        tensor: Tensor = getattr(params, name)
        if tensor.shape != (count,) or tensor.dtype != dtype:
            reject(f"params.{name}", f"{dtype} [{count}]", tensor)


__all__ = [
    "MAX_WIDTH",
    "check_draw",
    "check_logits",
    "check_penalise",
    "check_rows",
    "check_slots",
    "check_width",
]
