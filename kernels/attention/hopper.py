"""Launches the Hopper prefill kernel."""

from functools import cache

import torch
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.attention import AttentionBatch
from kernels.attention.hopper_kernel import hopper_kernel
from kernels.attention.tiles import HopperTile, power_of_two

_LAST_ROW = 2**31 - 128
"""Rows of a cache are counted in 32 bits, and one beyond them all has to be left."""


def fits_hopper(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> bool:
    """Whether this kernel is to serve such tensors: heads of 128, for which it was measured."""
    pages, kv_heads, page, dim = k_cache.shape
    return (
        _is_hopper(q.device)
        and q.dtype in (torch.float16, torch.bfloat16)
        and dim == 128
        and page in (8, 16, 32, 64, 128)
        and q.shape[1] // kv_heads <= 64
        and k_cache.stride(0) == v_cache.stride(0)
        and k_cache.stride(0) % dim == 0
        and pages * k_cache.stride(0) // dim < _LAST_ROW
        and all(cache.data_ptr() % 16 == 0 for cache in (k_cache, v_cache))
    )


def launch_hopper(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: AttentionBatch,
    out: Tensor,
    log2_scale: float,
    window: int | None,
    tile: HopperTile,
) -> None:
    """Write into `out` the rows of the sequences behind the first `batch.singles`."""
    kv_heads, page, dim = k_cache.shape[1:]
    group, first = q.shape[1] // kv_heads, batch.singles
    sequences = batch.context_lens.shape[0] - first
    tiles = hopper_tiles(q.shape[0], sequences, group)
    hopper_kernel[(-(-tiles * kv_heads // tile.each),)](
        q, _rows_of(k_cache), _rows_of(v_cache), out,
        batch.query_offsets, batch.context_lens, batch.page_table,
        *q.stride()[:2], batch.page_table.stride(0), log2_scale, window or 0,
        first, sequences, tiles, kv_heads, tile.each, k_cache.stride(0) // dim,
        GROUP=group, DIM=dim, PAGE=page, BLOCK_N=tile.keys,
        BLOCK_B=max(64, power_of_two(sequences)), STAGES=tile.stages,
        HAS_WINDOW=window is not None, num_warps=4,
    )  # fmt: skip


def hopper_tiles(rows: int, sequences: int, group: int) -> int:
    """Tiles that hold all rows whatever the sequences' lengths."""
    return rows // (2 * (64 // group)) + sequences


@cache
def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def _rows_of(cache: Tensor) -> TensorDescriptor:
    """All that lies between a cache's first and last element, as rows of D."""
    pages, heads, page, dim = cache.shape
    rows = (pages - 1) * (cache.stride(0) // dim) + heads * page
    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return TensorDescriptor(cache, [rows, dim], [dim, 1], [page, 64], layout)


__all__ = ["fits_hopper", "hopper_tiles", "launch_hopper"]
