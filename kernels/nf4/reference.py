"""NF4 in plain torch: the truth for every other implementation."""

import torch
from torch import Tensor

from kernels.checks import check_flat, check_linear
from kernels.nf4 import NF4_CODE, DenseWeight, NF4Weight, Weight
from kernels.nf4.packed import canonical

_TINY = 1e-38  # what bitsandbytes divides an all-zero block by


def dequantize(w: NF4Weight, dtype: torch.dtype) -> Tensor:
    """See `kernels.nf4.Dequantize`."""
    device = w.codes.device
    code = torch.tensor(NF4_CODE, dtype=torch.float32, device=device)
    nibbles = torch.stack((w.codes >> 4, w.codes & 15), dim=-1)  # [N, ceil(K / 2), 2]
    values = code[nibbles.flatten(1)[:, : w.columns].long()]  # [N, K]
    block = torch.arange(w.columns, device=device)[None] + w.phase[:, None]
    scales = w.absmax.gather(1, block // w.blocksize)  # [N, K]
    return (values * scales).to(dtype)


def prepare(w: Weight, dtype: torch.dtype) -> Weight:
    """See `kernels.nf4.Prepare`: nothing."""
    return w


def linear(x: Tensor, w: Weight, bias: Tensor | None = None) -> Tensor:
    """See `kernels.nf4.Linear`."""
    check_linear(x, w, bias)
    w = canonical(w)
    weight = w.weight if isinstance(w, DenseWeight) else dequantize(w, x.dtype)
    y = x.float() @ weight.float().T  # [T, N]
    return (y if bias is None else y + bias.float()).to(x.dtype)


def quantize_blocks(flat: Tensor, blocksize: int = 64) -> tuple[Tensor, Tensor]:
    """See `kernels.nf4.QuantizeBlocks`."""
    check_flat(flat, blocksize)
    code = torch.tensor(NF4_CODE, dtype=torch.float32, device=flat.device)
    midpoints = (code[:-1] + code[1:]) / 2
    codes, absmax = [], []
    for block in torch.split(flat, blocksize) if flat.numel() else ():
        peak = block.abs().amax()
        floor = peak.clamp(min=_TINY)
        # As bitsandbytes does: a full block keeps its absmax and is multiplied by the reciprocal,
        # the short last one keeps the clamped absmax and is divided by it.
        full = block.numel() == blocksize
        absmax.append(peak if full else floor)
        scaled = block * (1.0 / floor) if full else block / floor
        codes.append(torch.bucketize(scaled.clamp(-1, 1), midpoints))
    index = torch.cat(codes).to(torch.uint8) if codes else flat.new_empty(0, dtype=torch.uint8)
    if index.numel() % 2:
        index = torch.cat((index, index.new_full((1,), 7)))  # bitsandbytes pads with the value 0
    packed = (index[::2] << 4) | index[1::2]
    return packed, torch.stack(absmax) if absmax else flat.new_empty(0)


__all__ = ["dequantize", "linear", "prepare", "quantize_blocks"]
