"""NF4 on CUDA: fused products for few rows, expansion and the library's product for many.

A fused product reads bfloat16(GAIN * code) and bfloat16(absmax): within 2^-8 of the weight that
`dequantize` gives, as near as rounding to bfloat16 comes. A step has at most one such product at a
time on a device: they share a workspace.
"""

from functools import cache
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor
from torch.nn.functional import linear as dense_linear

from kernels.checks import check_linear
from kernels.nf4 import DenseWeight, NF4Weight, Weight
from kernels.nf4.choice import FUSED_ROWS, choose, choose_wide
from kernels.nf4.codebook import GAIN
from kernels.nf4.expand import dequantize, scaled_weight
from kernels.nf4.gemm import multiply
from kernels.nf4.packed import can_pack, pack
from kernels.nf4.packed_weight import PackedNF4
from kernels.nf4.reference import quantize_blocks


def prepare(w: Weight, dtype: torch.dtype) -> Weight:
    """Return the form of a weight that products with bfloat16 activations read, made at load.

    A dense weight, one whose rows begin inside a block, and one for another `dtype` stay as they
    are. The canonical shard may be freed: `kernels.nf4.packed.unpack` makes it again bit for bit.
    Waits for the device.
    """
    if not isinstance(w, NF4Weight) or dtype != torch.bfloat16 or not can_pack(w):
        return w
    return pack(w)


def linear(x: Tensor, w: Weight, bias: Tensor | None = None) -> Tensor:
    """See `kernels.nf4.Linear`.

    A packed weight takes part as its bfloat16 approximation (see above), others exactly.
    """
    check_linear(x, w, bias)
    rows, (features, columns) = x.shape[0], w.shape
    if isinstance(w, DenseWeight) or not rows or not features or not columns:
        return dense_linear(x, _dense(w, x.dtype), _narrow(bias, x))
    if isinstance(w, NF4Weight):
        return dense_linear(x, dequantize(w, x.dtype), _narrow(bias, x))
    if rows <= FUSED_ROWS:
        rows_of_x = x if x.stride(1) == 1 else x.contiguous()
        return _fused(rows_of_x, w, bias)
    # The gain is divided out by the product itself, in float32.
    weight = scaled_weight(w, x.dtype).T
    if bias is None:
        return torch.addmm(x.new_zeros(()), x, weight, beta=0, alpha=1 / GAIN)
    return torch.addmm(bias.to(x.dtype), x, weight, alpha=1 / GAIN)


def _fused(x: Tensor, w: PackedNF4, bias: Tensor | None) -> Tensor:
    rows, features = x.shape[0], w.rows
    config = choose_wide(rows, features, w.blocks)
    wide = _wide() if x.is_cuda and config is not None else None
    if wide is not None and config is not None and wide.can_take(x, w, config):
        y: Tensor = wide.multiply_wide(x, w, bias, config)
        return y
    return multiply(x, w, bias, choose(rows, features, w.blocks))


@cache
def _wide() -> ModuleType | None:
    """The kernel in Gluon, an experimental part of Triton that a version may lack."""
    try:
        return import_module("kernels.nf4.wide")
    except (ImportError, AttributeError):
        return None


def _dense(w: Weight, dtype: torch.dtype) -> Tensor:
    return w.weight.to(dtype) if isinstance(w, DenseWeight) else dequantize(w, dtype)


def _narrow(bias: Tensor | None, x: Tensor) -> Tensor | None:
    return None if bias is None else bias.to(x.dtype)


__all__ = ["dequantize", "linear", "prepare", "quantize_blocks"]
