"""What the launchers of the LoRA kernels share."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
import triton

from kernels.lora import LoraSegments, LoraTarget
from kernels.overlap import overlaps

SITES_PER_LAUNCH = 3
PRECISION = {torch.float16: "tf32x3", torch.bfloat16: "halves", torch.float32: "ieee"}
"""How h, which is float32, is multiplied by a B of each dtype."""


def launches(target: LoraTarget) -> Iterator[tuple[slice, LoraTarget]]:
    """Yield the sites of each launch: their places in the target, and a target of their own."""
    count = len(target.sites)
    if 0 < count <= SITES_PER_LAUNCH:
        yield slice(0, count), target
        return
    for start in range(0, count, SITES_PER_LAUNCH):
        at = slice(start, min(count, start + SITES_PER_LAUNCH))
        yield at, replace(target, sites=target.sites[at], spans=target.spans[at])


def padded(values: Sequence[int]) -> tuple[int, ...]:
    """Return the values and zeros for the sites that the launch doesn't have."""
    return (*values, *(0,) * (SITES_PER_LAUNCH - len(values)))


def unit_spans(target: LoraTarget) -> tuple[int, tuple[int, ...]]:
    """Return VECTOR, and the starts and widths of a launch's sites, padded, in units of it."""
    starts, widths = zip(*target.spans, strict=True)
    vector = math.gcd(16, *starts, *widths)
    return vector, (
        *padded([start // vector for start in starts]),
        *padded([width // vector for width in widths]),
    )


def row_grid(segments: LoraSegments, rows: int, block_rows: int) -> tuple[int, int, int]:
    """Return (row tiles of the grid, tiles a segment, BLOCK_SEGMENTS) as `find_rows` reads them.

    Tiles are dealt out evenly where that makes no more of them than looking up each one's segment:
    a segment of n rows fills at most n // block_rows + 1.
    """
    count = len(segments.descriptors)
    each = max(1, triton.cdiv(segments.longest(rows), block_rows))
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
    "unit_spans",
]
