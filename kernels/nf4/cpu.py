"""NF4 on CPU: vectorised, with scratch memory bounded by a chunk of rows."""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import linear as dense_linear
from torch.nn.functional import pad

from kernels.checks import check_flat, check_linear
from kernels.nf4 import NF4_CODE, DenseWeight, NF4Weight, Weight
from kernels.nf4.packed import canonical

_CODE = torch.tensor(NF4_CODE, dtype=torch.float32)
_MIDPOINTS = (_CODE[:-1] + _CODE[1:]) / 2
# Both values of a packed byte at once: [256, 2], high nibble first.
_PAIRS = torch.stack((_CODE.repeat_interleave(16), _CODE.repeat(16)), dim=1)
_CHUNK = 1 << 20  # values expanded at a time
_TINY = 1e-38  # what bitsandbytes divides an all-zero block by


def dequantize(w: NF4Weight, dtype: torch.dtype) -> Tensor:
    """See `kernels.nf4.Dequantize`."""
    rows, columns = w.shape
    out = torch.empty((rows, columns), dtype=dtype)
    if not out.numel():
        return out
    step = max(1, _CHUNK // columns)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        pairs = _PAIRS.index_select(0, w.codes[part].flatten().int())  # [rows * ceil(K / 2), 2]
        values = pairs.view(-1, w.codes.shape[1] * 2)[:, :columns]
        out[part] = values * _scales(w, part)
    return out


def linear(x: Tensor, w: Weight, bias: Tensor | None = None) -> Tensor:
    """See `kernels.nf4.Linear`."""
    check_linear(x, w, bias)
    bias = None if bias is None else bias.to(x.dtype)
    w = canonical(w)
    fast = w.fast if isinstance(w, DenseWeight) else w.dense
    if fast is not None and fast.is_mkldnn and fast.dtype == x.dtype:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, fast, bias, "none", [], "")
        return y
    return dense_linear(x, dense_weight(w, x.dtype), bias)


def prepare(w: Weight, dtype: torch.dtype) -> Weight:
    """See `kernels.nf4.Prepare`: a copy in oneDNN's blocked layout, de-quantised if need be.

    With it a float32 product takes 0.5 to 0.9 of the time from 4 rows on (one thread, AVX-512), as
    the layout suits wide registers, which MKL does not use on every processor.
    """
    w = canonical(w)
    if isinstance(w, DenseWeight):
        return replace(w, fast=_blocked(w.weight)) if w.weight.dtype == dtype else w
    dense = dequantize(w, dtype)
    blocked = _blocked(dense)
    return replace(w, dense=dense if blocked is None else blocked)


def _blocked(weight: Tensor) -> Tensor | None:
    """The weight [N, K] as oneDNN lays it out for products of any number of rows, if it can."""
    if weight.dtype != torch.float32 or not torch._C._has_mkldnn:
        return None
    if not weight.numel():
        return weight  # of a rank without a unit: it has its copy, as the others have theirs
    blocked: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
    return blocked


def dense_weight(w: Weight, dtype: torch.dtype) -> Tensor:
    """Return the weight as [N, K] of `dtype`: the copy that is there, or one made for this call."""
    w = canonical(w)
    held = w.weight if isinstance(w, DenseWeight) else w.dense
    if held is None:
        assert isinstance(w, NF4Weight)
        return dequantize(w, dtype)
    if held.is_mkldnn:
        held = held.to_dense()
    return held if held.dtype == dtype else held.to(dtype)


def quantize_blocks(flat: Tensor, blocksize: int = 64) -> tuple[Tensor, Tensor]:
    """See `kernels.nf4.QuantizeBlocks`."""
    check_flat(flat, blocksize)
    count = flat.numel()
    codes = torch.empty((count + 1) // 2, dtype=torch.uint8)
    absmax = torch.empty(-(-count // blocksize))
    step = max(1, _CHUNK // (2 * blocksize)) * 2 * blocksize  # even, and whole blocks
    for start in range(0, count, step):
        part = flat[start : start + step]
        scaled, peaks = _scale_blocks(part, blocksize)
        absmax[start // blocksize : start // blocksize + peaks.numel()] = peaks
        index = torch.bucketize(scaled, _MIDPOINTS, out_int32=True).to(torch.uint8)
        packed = (index[::2] << 4) | index[1::2]
        codes[start // 2 : start // 2 + packed.numel()] = packed
    return codes, absmax


def _scale_blocks(part: Tensor, blocksize: int) -> tuple[Tensor, Tensor]:
    """Return (values scaled to [-1, 1], even in number, and one absmax a block).

    As bitsandbytes does: full blocks keep their absmax and are multiplied by its reciprocal; a
    short last block keeps the clamped absmax and is divided by it; an odd end is padded with 0.
    """
    full = part.numel() // blocksize * blocksize
    blocks = part[:full].view(-1, blocksize)
    peaks = blocks.abs().amax(-1)
    scaled = (blocks * (1.0 / peaks.clamp(min=_TINY))[:, None]).flatten()
    if full < part.numel():
        tail = part[full:]
        peak = tail.abs().amax().clamp(min=_TINY)
        scaled = torch.cat((scaled, tail / peak))
        peaks = torch.cat((peaks, peak[None]))
    return pad(scaled, (0, scaled.numel() % 2)).clamp_(-1, 1), peaks


def _scales(w: NF4Weight, part: slice) -> Tensor:
    """Return float32 [rows, K], the absmax of each element of some rows."""
    phase, absmax = w.phase[part], w.absmax[part]
    low, high = (int(v) for v in torch.aminmax(phase))
    if low == high:  # whole blocks side by side: no index needed
        wide = absmax.repeat_interleave(w.blocksize, dim=1)
        return wide[:, low : low + w.columns]
    block = (torch.arange(w.columns)[None] + phase[:, None]) // w.blocksize
    return absmax.gather(1, block)


__all__ = ["dense_weight", "dequantize", "linear", "prepare", "quantize_blocks"]
