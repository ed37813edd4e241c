"""Gains and biases of adapters on CUDA: one launch for up to three sites of a projection.

Nothing is read back from the device, and the grid depends on shapes and `max_rows` alone, so it can
be captured. Steps without such adapters do not come here (`LoraSegments.affine`); those with them
pay a pass over y.
"""

import triton
from torch import Tensor

from kernels.checks import check_affine, check_lora, check_sites, reject
from kernels.lora import LoraSegments
from kernels.lora.launches import launches, padded, row_grid
from kernels.lora.triton_affine import affine_kernel

BLOCK_ROWS = 8
BLOCK_N = 256


def lora_affine_(
    y: Tensor,
    arena: Tensor,
    descriptors: Tensor,
    segments: LoraSegments,
    *,
    layer: int,
    sites: tuple[int, ...],
    num_sites: int,
    spans: tuple[tuple[int, int], ...],
    bias: Tensor | None,
) -> None:
    """See `kernels.lora.LoraAffine`; y's rows must be contiguous."""
    check_lora(y, "y", arena, descriptors, layer, num_sites)
    check_sites(sites, num_sites)
    check_affine(y, sites, spans, bias)
    if y.numel() and y.stride(1) != 1:
        reject("y", "of contiguous rows", y)
    if not (y.numel() and len(segments.descriptors)):
        return
    tiles, row_tiles, block_segments = row_grid(segments, y.shape[0], BLOCK_ROWS)
    for at in launches(len(sites)):
        starts, widths = zip(*spans[at], strict=True)
        if max(widths) == 0:
            continue
        heads = [2 * (layer * num_sites + site) for site in sites[at]]
        affine_kernel[(triton.cdiv(max(widths), BLOCK_N), tiles, len(heads))](
            y,
            y if bias is None else bias,
            arena,
            descriptors,
            segments.offsets,
            segments.descriptors,
            len(segments.descriptors),
            row_tiles,
            y.stride(0),
            *padded(heads),
            *padded(starts),
            *padded(widths),
            SITES=len(heads),
            HAS_BIAS=bias is not None,
            BLOCK_SEGMENTS=block_segments,
            BLOCK_ROWS=BLOCK_ROWS,
            BLOCK_N=BLOCK_N,
            num_warps=4,
            enable_fp_fusion=True,
        )


__all__ = ["lora_affine_"]
