"""Launches de-quantisation on the GPU."""

from functools import cache

import torch
import triton
from torch import Tensor

from kernels.nf4 import NF4_CODE, NF4Weight
from kernels.nf4.codebook import ORDER
from kernels.nf4.expand_kernel import expand_canonical, expand_packed, expand_scaled
from kernels.nf4.packed_weight import PackedNF4
from kernels.nf4.tables import prmt_table, value_table

_TILES, _PAIRS, _WARPS = 4, 2, 4
_SCALED_TILES, _SCALED_PAIRS, _SCALED_WARPS = 4, 2, 4
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


def scaled_weight(w: PackedNF4, dtype: torch.dtype) -> Tensor:
    """Return GAIN * w as [N, K], rounded as `multiply` with `scale_weights` rounds it.

    Faster than `dequantize`: bfloat16(GAIN * code) times bfloat16(absmax), rounded once more.
    """
    out = torch.empty(w.shape, dtype=dtype, device=w.words.device)
    if not out.numel():
        return out
    use_prmt = out.is_cuda and dtype == torch.bfloat16
    grid = (triton.cdiv(w.blocks, 2 * _SCALED_PAIRS), triton.cdiv(w.rows, 16 * _SCALED_TILES))
    expand_scaled[grid](
        w.words,
        w.scales,
        prmt_table(out.device) if use_prmt else value_table(out.device, dtype),
        out,
        w.rows,
        w.columns,
        w.scales.shape[1],
        w.blocks,
        TILES=_SCALED_TILES,
        PAIRS=_SCALED_PAIRS,
        USE_PRMT=use_prmt,
        num_warps=_SCALED_WARPS,
    )
    return out


def _expand_packed(w: PackedNF4, out: Tensor) -> None:
    grid = (triton.cdiv(w.blocks, 2 * _PAIRS), triton.cdiv(w.rows, 16 * _TILES))
    expand_packed[grid](
        w.words,
        w.scales,
        w.rest,
        _code_table(out.device, ORDER),
        out,
        w.rows,
        w.columns,
        w.scales.shape[1],
        w.blocks,
        TILES=_TILES,
        PAIRS=_PAIRS,
        num_warps=_WARPS,
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


__all__ = ["dequantize", "scaled_weight"]
