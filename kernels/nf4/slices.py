"""Some rows of a weight, of whatever form."""

import torch
from torch import Tensor

from kernels.nf4 import DenseWeight, Dequantize, NF4Weight, Weight
from kernels.nf4.packed import tiles_of
from kernels.nf4.packed_weight import PackedNF4

_TILE = 16
"""Rows that a packed weight keeps together."""


def float_rows(w: Weight, start: int, stop: int, dequantize: Dequantize) -> Tensor:
    """Return rows start .. stop as float32 [stop - start, K], exactly as the weight holds them.

    `dequantize` is that of the weight's device, for a canonical shard; no more than these rows, and
    up to 30 beside them, are expanded.
    """
    if isinstance(w, DenseWeight):
        return w.weight[start:stop].float()
    if isinstance(w, NF4Weight):
        return dequantize(
            NF4Weight(
                codes=w.codes[start:stop],
                absmax=w.absmax[start:stop],
                phase=w.phase[start:stop],
                columns=w.columns,
                blocksize=w.blocksize,
            ),
            torch.float32,
        )
    tiles = tiles_of(w, start, stop)
    whole = PackedNF4(
        words=tiles.words,
        scales=tiles.scales.contiguous(),
        rest=tiles.rest.contiguous(),
        rows=tiles.rows,
        columns=tiles.columns,
    )
    from kernels.nf4.expand import dequantize as expand  # Triton is not on every platform

    first = start % _TILE
    return expand(whole, torch.float32)[first : first + stop - start]


__all__ = ["float_rows"]
