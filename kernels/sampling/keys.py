"""Candidates as single int64 words whose order is the order of preference.

    63 ........ 32 | 31 ........ 0
    ordered logit  | ~id

The upper half is the float32 logit mapped to an int32 of the same order, the lower half the
inverted token id, so that one integer sort puts higher logits first and lower ids first among
equals. No two words are equal: the result of a top-k is unique, on every device and for every cut
of the vocabulary. Ids are exact up to 2**32 - 2.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["PAD", "best", "ids_of", "of_ids", "pack", "values_of"]

_LOW = 2**32 - 1
_FLIP = 2**31 - 1

PAD = -(0x7F80_0001 << 32)
"""Stands for no candidate: a logit of minus infinity, behind every real id."""


def pack(values: Tensor, ids: Tensor) -> Tensor:
    """Keys of float32 ``values`` and int64 ``ids`` (broadcastable to each other)."""
    bits = (values + 0.0).view(torch.int32)  # -0.0 + 0.0 is 0.0: equal logits, equal bits
    ordered = torch.where(bits < 0, bits ^ _FLIP, bits).to(torch.int64)
    return (ordered << 32) | (_LOW - ids)


def of_ids(ids: Tensor) -> Tensor:
    """Keys of ids alone, with a logit of 0."""
    return _LOW - ids


def values_of(keys: Tensor) -> Tensor:
    """The float32 logits of ``keys``; minus infinity of `PAD`."""
    ordered = (keys >> 32).to(torch.int32)
    return torch.where(ordered < 0, ordered ^ _FLIP, ordered).view(torch.float32)


def ids_of(keys: Tensor) -> Tensor:
    """The int64 token ids of ``keys``; no valid id of `PAD`."""
    return _LOW - (keys & _LOW)


def best(values: Tensor, first_id: int, width: int) -> Tensor:
    """The best ``width`` keys of each row, best first, filled up with `PAD`.

    Args:
        values: float32 [R, V], any R and V (0 included); column j is token ``first_id + j``.
        first_id: token id of column 0.
        width: keys per row.

    Returns:
        int64 [R, width].
    """
    rows, columns = values.shape
    if columns == 0:
        return values.new_full((rows, width), PAD, dtype=torch.int64)
    if width == 1:  # no need to make a key of every logit: max returns the first of equals
        top, column = values.max(dim=1, keepdim=True)
        return pack(top, column + first_id)
    ids = torch.arange(first_id, first_id + columns, device=values.device)
    keys = pack(values, ids).topk(min(width, columns), dim=1).values
    return torch.nn.functional.pad(keys, (0, width - keys.shape[1]), value=PAD)
