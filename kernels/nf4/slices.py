"""Some rows of a weight, of whatever form."""

import torch
from torch import Tensor

from kernels.nf4 import DenseWeight, Dequantize, NF4Weight, Weight
from kernels.nf4.packed import ROWS, tiles_of
from kernels.nf4.packed_weight import PackedNF4


def float_rows(w: Weight, start: int, stop: int, dequantize: Dequantize) -> Tensor:
    """Return rows start .. stop as float32 [stop - start, K], exactly as the weight holds them.

    `dequantize` is that of the weight's device, for a canonical shard. Of a packed one whole
    multiples of 128 rows are expanded, nothing else.
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
    from kernels.nf4.expand import dequantize as expand  # Triton is not on every platform

    first = start % ROWS
    return expand(_whole_tiles(w, start - first, stop), torch.float32)[first : first + stop - start]


def _whole_tiles(w: PackedNF4, start: int, stop: int) -> PackedNF4:
    """Rows from ``start``, a multiple of 128, on; padded like any packed weight, since kernels
    read all of the padding."""
    tiles = tiles_of(w, start, -(-stop // ROWS) * ROWS)
    return PackedNF4(
        words=tiles.words,
        scales=tiles.scales.contiguous(),
        rest=tiles.rest.contiguous(),
        rows=tiles.rows,
        columns=tiles.columns,
    )


__all__ = ["float_rows"]
