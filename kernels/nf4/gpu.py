"""NF4 on CUDA: fused products for few rows, expansion and the library's product for many.

A fused product reads bfloat16(GAIN * code) and bfloat16(absmax): within 2^-8 of the weight that
`dequantize` gives, as near as rounding to bfloat16 comes. A step has at most one such product at a
time on a device: they share a workspace.
"""

import torch
from torch import Tensor
from torch.nn.functional import linear as dense_linear

from kernels.checks import check_linear, check_norm
from kernels.fused.gpu import add_rms_norm
from kernels.nf4 import DenseWeight, NF4Weight, Weight
from kernels.nf4.choice import FUSED_ROWS, choose, choose_wide
from kernels.nf4.codebook import GAIN
from kernels.nf4.expand import dequantize, scaled_weight
from kernels.nf4.few import multiply_few, norm_multiply_few
from kernels.nf4.few_choice import FUSED_NORM_ROWS, choose_few
from kernels.nf4.few_config import FewConfig
from kernels.nf4.gemm import multiply
from kernels.nf4.packed import can_pack, pack
from kernels.nf4.packed_weight import PackedNF4
from kernels.nf4.reference import quantize_blocks
from kernels.nf4.wide import can_take, multiply_wide
from kernels.overlap import overlaps
from kernels.sizes import lined, shared_room


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
        return _fused(lined(x), w, bias)
    # The gain is divided out by the product itself, in float32.
    weight = scaled_weight(w, x.dtype).T
    if bias is None:
        return torch.addmm(x.new_zeros(()), x, weight, beta=0, alpha=1 / GAIN)
    return torch.addmm(bias.to(x.dtype), x, weight, alpha=1 / GAIN)


def _fused(x: Tensor, w: PackedNF4, bias: Tensor | None) -> Tensor:
    rows, features = x.shape[0], w.rows
    few = _few(x, w)
    if few is not None:
        return multiply_few(x, w, bias, few)
    wide = choose_wide(rows, features, w.blocks)
    if wide is not None and can_take(x, w, wide):
        return multiply_wide(x, w, bias, wide)
    return multiply(x, w, bias, choose(rows, features, w.blocks, shared_room(x.device)))


def norm_linear(
    x: Tensor,
    residual: Tensor,
    norm: Tensor,
    eps: float,
    w: Weight,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `kernels.nf4.NormLinear`; in one launch for few rows."""
    check_norm(x, norm, residual)
    check_linear(x, w, bias)
    if isinstance(w, PackedNF4) and x.shape[0] <= FUSED_NORM_ROWS:
        config = _few(x, w)
        if config is not None and config.split == 1:
            lines = lined(x), residual.contiguous(), norm.contiguous()
            return norm_multiply_few(*lines, eps, w, bias, config)
    normed, total = add_rms_norm(x, residual, norm, eps)
    return linear(normed, w, bias), total


def _few(x: Tensor, w: PackedNF4) -> FewConfig | None:
    """The configuration of the kernel for few rows, where that was the faster one."""
    if x.dtype != torch.bfloat16 or not overlaps(x.device):
        return None
    if not x.shape[0] or not w.rows or not w.columns:
        return None
    return choose_few(x.shape[0], w.rows, w.blocks, shared_room(x.device))


def _dense(w: Weight, dtype: torch.dtype) -> Tensor:
    return w.weight.to(dtype) if isinstance(w, DenseWeight) else dequantize(w, dtype)


def _narrow(bias: Tensor | None, x: Tensor) -> Tensor | None:
    return None if bias is None else bias.to(x.dtype)


__all__ = [
    "dequantize",
    "linear",
    "norm_linear",
    "prepare",
    "quantize_blocks",
]
