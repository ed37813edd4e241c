"""Launches the decode kernel: one row a sequence."""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from kernels.attention import AttentionBatch, HeadNorms
from kernels.attention.decode_kernel import decode_kernel
from kernels.attention.tiles import PROGRAMS, DecodeTile, merged_at_once
from kernels.overlap import overlaps
from kernels.sizes import power_of_two


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class NewRows:
    """Keys and values as projected, and what it takes to rotate them and to store them."""

    k: Tensor
    """[T, Hkv, D], dim contiguous."""
    v: Tensor
    """[T, Hkv, D], dim contiguous."""
    cos_sin: Tensor
    """float32 [positions, D], contiguous."""
    positions: Tensor
    """int64 [T]."""
    norms: HeadNorms | None


def launch_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: AttentionBatch,
    out: Tensor,
    log2_scale: float,
    window: int | None,
    tile: DecodeTile,
    splits: int,
    new: NewRows | None = None,
) -> None:
    """Write into `out` the rows of the sequences that have one, of the first `batch.singles`.

    With `new`, q is as projected too, and keys and values of the rows are stored on the way.
    Programs of one device share a workspace, so launches must not run on two streams at a time.
    """
    kv_heads, page = k_cache.shape[1:3]
    group, dim = q.shape[1] // kv_heads, q.shape[2]
    sequences = batch.singles
    assert splits == 1 or sequences * kv_heads * splits <= PROGRAMS
    part, lse, count = workspace(q.device, group * dim, group)
    overlap = new is not None and overlaps(q.device)
    norms = None if new is None else new.norms
    is_one_each = batch.max_query <= 1 and q.shape[0] == sequences
    rows = (
        NewRows(k=q, v=q, cos_sin=lse, positions=batch.write_pages, norms=None)
        if new is None
        else new
    )
    options = {"launch_pdl": True} if overlap else {}
    decode_kernel[(kv_heads, splits, sequences)](
        q, k_cache, v_cache, out, part, lse, count,
        batch.query_offsets, batch.context_lens, batch.page_table,
        rows.k, rows.v, rows.cos_sin, rows.positions, batch.write_pages, batch.write_slots,
        q if norms is None else norms.q, q if norms is None else norms.k,
        *q.stride()[:2], *rows.k.stride()[:2], *rows.v.stride()[:2],
        k_cache.stride(0), v_cache.stride(0), batch.page_table.stride(0),
        log2_scale, 0.0 if norms is None else norms.eps, window or 0, splits, tile.min_split,
        GROUP=group, DIM=dim, PAGE=page,
        BLOCK_M=max(16, power_of_two(group)), BLOCK_N=tile.keys, BLOCK_D=max(16, power_of_two(dim)),
        BLOCK_G=power_of_two(group), BLOCK_S=merged_at_once(group, dim),
        IS_NEW=new is not None, HAS_NORM=norms is not None, HAS_SPLITS=splits > 1,
        HAS_WINDOW=window is not None, USE_PDL=overlap, ROW_IS_B=is_one_each,
        num_warps=tile.warps, num_stages=tile.stages, **options,
    )  # fmt: skip


@cache
def workspace(device: torch.device, width: int, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Partial results, their sums, and counters that every launch leaves at zero."""
    return (
        torch.empty(PROGRAMS * width, dtype=torch.float32, device=device),
        torch.empty(PROGRAMS * group, dtype=torch.float32, device=device),
        torch.zeros(PROGRAMS, dtype=torch.int32, device=device),
    )


__all__ = ["NewRows", "launch_decode", "workspace"]
