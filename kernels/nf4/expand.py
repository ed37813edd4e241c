"""Launches de-quantisation on the GPU."""

from functools import cache

import torch
import triton
from torch import Tensor

from kernels.nf4 import NF4_CODE, NF4Weight
from kernels.nf4.codebook import ORDER
from kernels.nf4.expand_kernel import expand_canonical, expand_packed
from kernels.nf4.packed import BLOCK, PackedNF4

_TILES = 4
_COLUMNS = 1024


def dequantize(w: NF4Weight | PackedNF4, dtype: torch.dtype) -> Tensor:
    """See `kernels.nf4.Dequantize`; exact for both forms."""
    device = (w.words if isinstance(w, PackedNF4) else w.codes).device
    out = torch.empty(w.shape, dtype=dtype, device=device)
    if not out.numel():
        return out
    if isinstance(w, PackedNF4):
        _expand_packed(w, out)
    else:
        _expand_canonical(w, out)
    return out


def _expand_packed(w: PackedNF4, out: Tensor) -> None:
    grid = (triton.cdiv(w.rows, 16 * _TILES), triton.cdiv(w.columns, BLOCK))
    expand_packed[grid](
        w.words,
        w.scales,
        w.rest,
        _code_table(out.device, ORDER),
        out,
        w.rows,
        w.columns,
        w.scales.shape[1],
        w.words.shape[1] // (2 * BLOCK),
        TILES=_TILES,
        num_warps=4,
    )


def _expand_canonical(w: NF4Weight, out: Tensor) -> None:
    codes, absmax = w.codes, w.absmax
    assert codes.stride(1) == 1 and absmax.stride(1) == 1
    expand_canonical[(w.out_features, triton.cdiv(w.columns, _COLUMNS))](
        codes,
        absmax,
        w.phase,
        _code_table(out.device, tuple(range(16))),
        out,
        w.columns,
        codes.stride(0),
        absmax.stride(0),
        w.blocksize,
        BK=_COLUMNS,
        num_warps=4,
    )


@cache
def _code_table(device: torch.device, order: tuple[int, ...]) -> Tensor:
    return torch.tensor([NF4_CODE[code] for code in order], dtype=torch.float32, device=device)


__all__ = ["dequantize"]
