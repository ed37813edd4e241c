"""The lookup tables of the NF4 kernels, one copy a device."""

from functools import cache

import torch
from torch import Tensor

from kernels.nf4.codebook import BITS, EXACT, TABLE


@cache
def prmt_table(device: torch.device) -> Tensor:
    """Return `codebook.TABLE`, padded to 8 words, as int32 [32 * 8], one copy a lane."""
    signed = [word - (1 << 32) if word >> 31 else word for word in TABLE] + [0] * (8 - len(TABLE))
    return torch.tensor(signed * 32, dtype=torch.int32, device=device)


@cache
def value_table(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return GAIN * value of each kernel code as float32 [16], rounded if `dtype` is bfloat16."""
    if dtype != torch.bfloat16:
        return torch.tensor(EXACT, dtype=torch.float32, device=device)
    bits = torch.tensor(BITS, dtype=torch.int32, device=device) << 16
    return bits.view(torch.float32)


@cache
def pair_table(device: torch.device) -> Tensor:
    """Return the bfloat16 bits of GAIN * value of two kernel codes as int32 [256].

    Of a byte's two codes the one in its low half is in the low half.
    """
    bits = torch.tensor(BITS, dtype=torch.int64)
    pairs = (bits[:, None] << 16 | bits[None]).flatten()
    return torch.where(pairs >= 1 << 31, pairs - (1 << 32), pairs).to(torch.int32).to(device)


__all__ = ["pair_table", "prmt_table", "value_table"]
