"""Gains and biases of adapters on CUDA: one launch for up to three sites of a projection.

Nothing is read back from the device, and the grid depends on shapes and `max_rows` alone, so it can
be captured. Steps without such adapters do not come here (`LoraSegments.affine`); those with them
pay a pass over y.
"""

import triton
from torch import Tensor

from kernels.checks import check_affine, check_dtype, check_lined
from kernels.lora import LoraBatch, LoraTarget
from kernels.lora.launches import launches, padded, row_grid
from kernels.lora.triton_affine import affine_kernel

BLOCK_ROWS = 8
BLOCK_N = 256


def lora_affine_(y: Tensor, batch: LoraBatch, target: LoraTarget, bias: Tensor | None) -> None:
    """See `kernels.lora.LoraAffine`; y's rows must be contiguous."""
    check_affine(y, target, bias)
    check_dtype("y", y)
    check_lined("y", y)
    segments = batch.segments
    if not (y.numel() and len(segments.descriptors)):
        return
    tiles, row_tiles, block_segments = row_grid(segments, y.shape[0], BLOCK_ROWS)
    for _, launch in launches(target):
        starts, widths = zip(*launch.spans, strict=True)
        if max(widths) == 0:
            continue
        affine_kernel[(triton.cdiv(max(widths), BLOCK_N), tiles, len(launch.sites))](
            y,
            y if bias is None else bias,
            batch.arena,
            batch.descriptors,
            segments.offsets,
            segments.descriptors,
            len(segments.descriptors),
            row_tiles,
            y.stride(0),
            *padded(launch.heads),
            *padded(starts),
            *padded(widths),
            SITES=len(launch.sites),
            HAS_BIAS=bias is not None,
            BLOCK_SEGMENTS=block_segments,
            BLOCK_ROWS=BLOCK_ROWS,
            BLOCK_N=BLOCK_N,
            num_warps=4,
            enable_fp_fusion=True,
        )


__all__ = ["lora_affine_"]
