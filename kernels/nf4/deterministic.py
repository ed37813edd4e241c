"""The base projection on CPU with one order of summation for every number of rows.

A GEMM library picks its kernel, and with it the order of a sum, by shape. So every product has the
same shape here: tiles of `ROWS` rows, the last one padded with zeros. Within one shape the order
depends on the column alone, provided that there are enough columns to fill the vector kernels.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import linear as dense_linear
from torch.nn.functional import pad

from kernels.checks import check_linear
from kernels.nf4 import DenseWeight, Weight
from kernels.nf4.cpu import dense_weight, dequantize
from kernels.nf4.packed import canonical

ROWS = 8
"""Rows of a tile: 3.5 times the cost of a lone row, 1.3 times that of a large product."""
_COLUMNS = 16
_ALIGNMENT = 64


def prepare(w: Weight, dtype: torch.dtype) -> Weight:
    """See `kernels.nf4.Prepare`: a plain de-quantised copy, as tiles are multiplied from one."""
    w = canonical(w)
    return w if isinstance(w, DenseWeight) else replace(w, dense=dequantize(w, dtype))


def linear(x: Tensor, w: Weight, bias: Tensor | None = None) -> Tensor:
    """See `kernels.nf4.Linear`; a row's bits don't depend on T, its place, or other rows."""
    check_linear(x, w, bias)
    weight = dense_weight(w, x.dtype)
    width = weight.shape[0]
    if 0 < width < _COLUMNS:
        weight = pad(weight, (0, 0, 0, _COLUMNS - width))
    y = torch.cat([dense_linear(tile, weight) for tile in _tiles(x)] or [x.new_empty(0, width)])
    y = y[: x.shape[0], :width]
    return y if bias is None else y + bias.to(x.dtype)


def _tiles(x: Tensor) -> list[Tensor]:
    """Return [ROWS, K] tiles at aligned addresses; the last is padded with zero rows."""
    padded = pad(x, (0, 0, 0, -x.shape[0] % ROWS)).contiguous()
    tiles = torch.split(padded, ROWS) if padded.shape[0] else ()
    return [tile if tile.data_ptr() % _ALIGNMENT == 0 else tile.clone() for tile in tiles]


__all__ = ["ROWS", "linear", "prepare"]
