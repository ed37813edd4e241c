"""What the launchers of the LoRA kernels share."""

from collections.abc import Iterator, Sequence

import torch
import triton

from kernels.lora import LoraSegments
from kernels.overlap import overlaps

SITES_PER_LAUNCH = 3
PRECISION = {torch.float16: "tf32x3", torch.bfloat16: "halves", torch.float32: "ieee"}
"""How h, which is float32, is multiplied by a B of each dtype."""


def launches(sites: int) -> Iterator[slice]:
    """Yield the sites of each launch."""
    for start in range(0, sites, SITES_PER_LAUNCH):
        yield slice(start, min(sites, start + SITES_PER_LAUNCH))


def padded(values: Sequence[int]) -> tuple[int, ...]:
    """Return the values and zeros for the sites that the launch doesn't have."""
    return (*values, *(0,) * (SITES_PER_LAUNCH - len(values)))


def row_grid(segments: LoraSegments, rows: int, block_rows: int) -> tuple[int, int, int]:
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
    return packed, 1, segment_block(count)


def segment_block(count: int) -> int:
    """BLOCK_SEGMENTS for `count` segments: one for most steps, as each is compiled by itself."""
    return max(64, int(triton.next_power_of_2(count)))


def launch_options(device: torch.device, warps: int, overlap: bool = True) -> dict[str, int | bool]:
    """Return what the launcher and the kernel need to know of the device."""
    overlap = overlap and overlaps(device)
    options = {"num_warps": warps, "USE_PDL": overlap, "enable_fp_fusion": True}
    return {**options, "launch_pdl": True} if overlap else options


__all__ = [
    "PRECISION",
    "SITES_PER_LAUNCH",
    "launch_options",
    "launches",
    "padded",
    "row_grid",
    "segment_block",
]
