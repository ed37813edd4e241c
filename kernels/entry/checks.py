"""Argument checks that the implementations of a step's beginning share."""

import torch
from torch import Tensor

from kernels.checks import reject


def check_spell_out(
    tokens: Tensor,
    positions: Tensor,
    row_slots: Tensor,
    slots: Tensor,
    last_token: Tensor,
    tables: Tensor,
    blocks: int,
) -> None:
    """Check the arguments of `spell_out`."""
    rows = tokens.shape[0]
    for name, tensor in (("tokens", tokens), ("positions", positions), ("row_slots", row_slots)):
        if tensor.shape != (rows,) or tensor.dtype != torch.int64:
            reject(name, f"int64 [{rows}]", tensor)
    if slots.ndim != 1 or slots.dtype != torch.int64:
        reject("slots", "int64 [B]", slots)
    if last_token.ndim != 1 or last_token.dtype != torch.int64:
        reject("last_token", "int64 [S]", last_token)
    if tables.ndim != 2 or tables.dtype != torch.int32 or not 0 <= blocks <= tables.shape[1]:
        reject("tables", f"int32 [S, {blocks} or more]", tables)


def check_embed(tokens: Tensor, weight: Tensor) -> None:
    """Check the arguments of `embed`."""
    if tokens.ndim != 1 or tokens.dtype != torch.int64:
        reject("tokens", "int64 [T]", tokens)
    if weight.ndim != 2:
        reject("weight", "[V, H]", weight)


__all__ = ["check_embed", "check_spell_out"]
