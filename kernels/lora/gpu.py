"""LoRA deltas on CUDA: one shrink and one expand launch for up to three sites of a projection.

Nothing is read back from the device, and the grids depend on shapes, `max_rows` and `max_rank`
alone: both ops can be captured into a CUDA graph, whose steps may then have fewer segments, the
rest being empty, and any ranks and rows within these bounds.

Launches overlap with the one before them (programmatic dependent launch) and read segments,
records and adapters early: what writes those must not be the very last launch before a shrink.
"""

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
import triton
from torch import Tensor

from kernels.checks import check_expand, check_lora, check_sites, reject
from kernels.lora import LoraSegments
from kernels.lora.plans import ExpandPlan, ShrinkPlan, plan_expand, plan_shrink
from kernels.lora.triton_expand import expand_kernel
from kernels.lora.triton_shrink import shrink_kernel

SITES_PER_LAUNCH = 3
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_PRECISION = {torch.float16: "tf32x3", torch.bfloat16: "halves", torch.float32: "ieee"}


def lora_shrink(
    x: Tensor,
    arena: Tensor,
    descriptors: Tensor,
    segments: LoraSegments,
    *,
    layer: int,
    sites: tuple[int, ...],
    num_sites: int,
    plan: ShrinkPlan | None = None,
) -> Tensor:
    """See `kernels.lora.LoraShrink`; returns h in parts. Ranks above max_rank read as 0."""
    check_lora(x, "x", arena, descriptors, layer, num_sites)
    check_sites(sites, num_sites)
    _check_dtype(x, "x")
    rows, width = x.shape
    if not (rows and segments.max_rank and sites and len(segments.descriptors)):
        return x.new_zeros((len(sites), rows, segments.max_rank), dtype=torch.float32)
    x = x if x.stride(1) == 1 else x.contiguous()
    together = min(len(sites), SITES_PER_LAUNCH)
    plan = plan or plan_shrink(rows, segments, together, width, x.dtype)
    shape = (plan.parts(width), len(sites), rows, segments.max_rank)
    h = torch.empty(shape, dtype=torch.float32, device=x.device)
    tiles, row_tiles, block_segments = _row_grid(segments, rows, plan.block_rows)
    for at in _launches(len(sites)):
        heads = [2 * (layer * num_sites + site) for site in sites[at]]
        rank_rows = len(heads) * segments.max_rank
        shrink_kernel[(shape[0], tiles, triton.cdiv(rank_rows, plan.block_ranks))](
            x,
            h[:, at],
            arena,
            descriptors,
            segments.offsets,
            segments.descriptors,
            len(segments.descriptors),
            row_tiles,
            segments.max_rank,
            width,
            x.stride(0),
            h.stride(0),
            h.stride(1),
            *_padded(heads),
            SITES=len(heads),
            STEPS=plan.steps,
            BLOCK_SEGMENTS=block_segments,
            BLOCK_ROWS=plan.block_rows,
            BLOCK_RANKS=plan.block_ranks,
            BLOCK_K=plan.block_k,
            ITEM=x.element_size(),
            PRECISION="ieee",
            USE_DOT=plan.dot,
            num_stages=plan.stages,
            **_launch_options(x.device, plan.warps),
        )
    return h


def lora_expand_(
    y: Tensor,
    h: Tensor,
    arena: Tensor,
    descriptors: Tensor,
    segments: LoraSegments,
    *,
    layer: int,
    sites: tuple[int, ...],
    num_sites: int,
    spans: tuple[tuple[int, int], ...],
    plan: ExpandPlan | None = None,
) -> None:
    """See `kernels.lora.LoraExpand`; y's rows must be contiguous."""
    check_lora(y, "y", arena, descriptors, layer, num_sites)
    check_sites(sites, num_sites)
    parts = h if h.ndim == 4 else h[None]  # [P, sites, T, max_rank]
    check_expand(y, parts[0], segments, sites, spans)
    _check_dtype(y, "y")
    if y.numel() and y.stride(1) != 1:
        reject("y", "of contiguous rows", y)
    if not (h.numel() and len(segments.descriptors)):
        return
    rows = y.shape[0]
    for at in _launches(len(sites)):
        starts, widths = zip(*spans[at], strict=True)
        if not any(widths):
            continue
        heads = [2 * (layer * num_sites + site) for site in sites[at]]
        chosen = plan or plan_expand(rows, segments, max(widths), y.dtype)
        tiles, row_tiles, block_segments = _row_grid(segments, rows, chosen.block_rows)
        vector = math.gcd(16, *starts, *widths)
        columns = sum(triton.cdiv(width, chosen.columns) for width in widths)
        expand_kernel[(columns, tiles)](
            y,
            parts[:, at],
            arena,
            descriptors,
            segments.offsets,
            segments.descriptors,
            len(segments.descriptors),
            row_tiles,
            segments.max_rank,
            y.stride(0),
            parts.stride(0),
            parts.stride(1),
            *_padded(heads),
            *_padded([start // vector for start in starts]),
            *_padded([width // vector for width in widths]),
            SITES=len(heads),
            PARTS=parts.shape[0],
            BLOCK_SEGMENTS=block_segments,
            BLOCK_ROWS=chosen.block_rows,
            BLOCK_RANKS=chosen.block_ranks,
            BLOCK_N=chosen.block_columns,
            COLUMN_TILES=chosen.column_tiles,
            VECTOR=vector,
            ITEM=y.element_size(),
            PRECISION=_PRECISION[y.dtype],
            USE_DOT=chosen.dot,
            USE_TURNS=segments.max_rank > chosen.block_ranks,
            num_stages=1,
            **_launch_options(y.device, chosen.warps),
        )


def _launches(sites: int) -> Iterator[slice]:
    """Yield the sites of each launch."""
    for start in range(0, sites, SITES_PER_LAUNCH):
        yield slice(start, min(sites, start + SITES_PER_LAUNCH))


def _padded(values: Sequence[int]) -> tuple[int, ...]:
    """Return the values and zeros for the sites that the launch doesn't have."""
    return (*values, *(0,) * (SITES_PER_LAUNCH - len(values)))


def _row_grid(segments: LoraSegments, rows: int, block_rows: int) -> tuple[int, int, int]:
    """Return (row tiles of the grid, tiles a segment, BLOCK_SEGMENTS) as `find_rows` reads them.

    Tiles are dealt out evenly where that makes no more of them than looking up each one's segment:
    a segment of n rows fills at most n // block_rows + 1.
    """
    count = len(segments.descriptors)
    longest = rows if segments.max_rows is None else min(rows, segments.max_rows)
    each = max(1, triton.cdiv(longest, block_rows))
    packed = count + rows // block_rows
    if count * each <= packed:
        return count * each, each, 0
    return packed, 1, triton.next_power_of_2(count)


def _launch_options(device: torch.device, warps: int) -> dict[str, int | bool]:
    """Return what the launcher and the kernel need to know of the device."""
    overlap = can_overlap(device)
    options = {"num_warps": warps, "USE_PDL": overlap, "enable_fp_fusion": True}
    return {**options, "launch_pdl": True} if overlap else options


@lru_cache
def can_overlap(device: torch.device) -> bool:
    """Whether a launch may begin before the one before it has ended (Hopper and later)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def _check_dtype(rows: Tensor, name: str) -> None:
    if rows.dtype not in DTYPES:
        reject(name, f"of dtype {', '.join(map(str, DTYPES))}", rows)


__all__ = ["can_overlap", "lora_expand_", "lora_shrink"]
