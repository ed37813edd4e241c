"""Launches the NF4 product for many rows, where Gluon and Hopper are there: checks, grid."""

from functools import cache

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.nf4.packed_weight import BLOCK, PackedNF4
from kernels.nf4.tables import pair_table, prmt_table
from kernels.nf4.wide_config import SUMS, WideConfig
from kernels.nf4.wide_kernel import nf4_wide

_ALIGNMENT = 8  # values of 16 bits in what a copy by the hardware starts at
_OUTPUTS = 1 << 14
_ROWS_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
_WORDS_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


def can_take(x: Tensor, w: PackedNF4, config: WideConfig) -> bool:
    """Say whether the device can copy x and the result, in bfloat16, and tell the outputs apart."""
    return (
        x.is_cuda
        and x.dtype == torch.bfloat16
        and x.stride(1) == 1
        and x.stride(0) % _ALIGNMENT == 0
        and w.rows % _ALIGNMENT == 0
        and x.data_ptr() % (2 * _ALIGNMENT) == 0
        and _outputs(x.shape[0], w.rows, config) <= _OUTPUTS
        and _processors(x.device) > 0
    )


def multiply_wide(x: Tensor, w: PackedNF4, bias: Tensor | None, config: WideConfig) -> Tensor:
    """Return x W^T + bias as [T, N] in bfloat16, as `gemm.multiply` with `scale_weights`.

    Like there, products must not run on two streams at a time: they share a workspace, and the
    programs of one wait for each other. Raises ValueError unless `can_take` the arguments.
    """
    if not can_take(x, w, config):
        raise ValueError(
            f"x must be bfloat16 on a Hopper device, its rows and those of the result multiples of "
            f"{2 * _ALIGNMENT} bytes apart, got {x.dtype} {tuple(x.shape)} of strides "
            f"{x.stride()} for {w.rows} features"
        )
    rows, features = x.shape[0], w.rows
    y = x.new_empty(rows, features)
    width, columns = 16 * config.tiles, BLOCK * config.blocks
    outputs = _outputs(rows, features, config)
    units = w.blocks // (2 * config.blocks)
    share = -(-units * outputs // (_processors(x.device) * config.programs))
    partial, counts = _workspace(x.device)
    nf4_wide[(-(-units * outputs // share),)](
        TensorDescriptor.from_tensor(x, [config.rows, columns], _ROWS_LAYOUT),
        TensorDescriptor.from_tensor(w.words, [config.tiles, 2 * columns], _WORDS_LAYOUT),
        TensorDescriptor.from_tensor(w.scales, [1, width], _WORDS_LAYOUT),
        TensorDescriptor.from_tensor(y, [config.rows, width], _ROWS_LAYOUT),
        pair_table(x.device) if config.table else prmt_table(x.device),
        bias,
        y,
        partial,
        counts,
        rows,
        features,
        units,
        outputs,
        share,
        STAGES=config.stages,
        ROW_TILES=-(-rows // config.rows),
        USE_SHARED=config.table,
        num_warps=config.warps,
        maxnreg=config.registers,
        launch_pdl=True,
    )
    return y


def _outputs(rows: int, features: int, config: WideConfig) -> int:
    return -(-rows // config.rows) * -(-features // (16 * config.tiles))


@cache
def _processors(device: torch.device) -> int:
    """Processors of a Hopper device; 0 for any other."""
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count if properties.major == 9 else 0


@cache
def _workspace(device: torch.device) -> tuple[Tensor, Tensor]:
    """Two partial outputs a program, and arrivals, which every launch leaves at zero."""
    partial = torch.empty(2 * _processors(device) * SUMS, dtype=torch.float32, device=device)
    return partial, torch.zeros(_OUTPUTS, dtype=torch.int32, device=device)


__all__ = ["can_take", "multiply_wide"]
