"""Launches the prefill kernel: chunks of rows behind a cached prefix."""

from functools import cache

import torch
from torch import Tensor

from kernels.attention import AttentionBatch
from kernels.attention.prefill_kernel import prefill_kernel
from kernels.attention.tiles import PREFILL_PROGRAMS, Tile
from kernels.sizes import power_of_two

_MIN_SPLIT = 256
"""Keys of the smallest split."""


def launch_prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: AttentionBatch,
    out: Tensor,
    log2_scale: float,
    window: int | None,
    tile: Tile,
    splits: int = 1,
) -> None:
    """Write into `out` the rows of the sequences behind the first `batch.singles`.

    Programs of one device share a workspace, so launches must not run on two streams at a time.
    """
    kv_heads, page = k_cache.shape[1:3]
    group, dim = q.shape[1] // kv_heads, q.shape[2]
    first, block_d = batch.singles, max(16, power_of_two(dim))
    sequences = batch.context_lens.shape[0] - first
    tiles = tile_count(q.shape[0], sequences, group, tile)
    assert splits == 1 or tiles * kv_heads * splits <= PREFILL_PROGRAMS
    width = tile.lines * block_d if splits > 1 else 0
    part, lse, count = workspace(q.device, width, tile.lines)
    prefill_kernel[(tiles, kv_heads, splits)](
        q, k_cache, v_cache, out, part, lse, count,
        batch.query_offsets, batch.context_lens, batch.page_table,
        *q.stride()[:2], k_cache.stride(0), v_cache.stride(0), batch.page_table.stride(0),
        log2_scale, window or 0, first, sequences, splits,
        GROUP=group, DIM=dim, PAGE=page,
        BLOCK_M=tile.lines, BLOCK_N=tile.keys, BLOCK_D=block_d,
        BLOCK_B=max(64, power_of_two(sequences)), MIN_SPLIT=max(_MIN_SPLIT, tile.keys),
        HAS_SPLITS=splits > 1, HAS_WINDOW=window is not None,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def tile_count(rows: int, sequences: int, group: int, tile: Tile) -> int:
    """Tiles that hold all rows whatever the sequences' lengths."""
    return rows // (tile.lines // group) + sequences


@cache
def workspace(device: torch.device, width: int, lines: int) -> tuple[Tensor, Tensor, Tensor]:
    """Partial results, their sums, and counters that every launch leaves at zero."""
    programs = PREFILL_PROGRAMS if width else 0
    return (
        torch.empty(programs * width, dtype=torch.float32, device=device),
        torch.empty(programs * lines, dtype=torch.float32, device=device),
        torch.zeros(programs, dtype=torch.int32, device=device),
    )


__all__ = ["launch_prefill", "tile_count", "workspace"]
