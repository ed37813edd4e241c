"""LoRA deltas in plain torch, one segment and site at a time: the truth for every other
implementation."""

import struct
from collections.abc import Iterator

import torch
from torch import Tensor

from kernels.checks import (
    check_affine,
    check_expand,
    check_lora,
    check_segment_rows,
    check_sites,
)
from kernels.lora import LoraSegments


def lora_shrink(
    x: Tensor,
    arena: Tensor,
    descriptors: Tensor,
    segments: LoraSegments,
    *,
    layer: int,
    sites: tuple[int, ...],
    num_sites: int,
) -> Tensor:
    """See `kernels.lora.LoraShrink`."""
    check_lora(x, "x", arena, descriptors, layer, num_sites)
    check_sites(sites, num_sites)
    check_segment_rows("x", x.shape[0], int(segments.offsets[-1]))
    h = x.new_zeros((len(sites), x.shape[0], segments.max_rank), dtype=torch.float32)
    for i, site in enumerate(sites):
        for start, stop, number in _adapter_segments(segments):
            offsets, _, _ = _read_record(descriptors, number, layer, site, num_sites)
            if len(offsets) > segments.max_rank:
                raise ValueError(
                    f"segments.max_rank must be >= {len(offsets)}, the rank of an adapter in "
                    f"layer {layer}, got {segments.max_rank}"
                )
            if offsets:
                a = _rows(arena, offsets, x.shape[1], x.dtype)  # [r, K]
                h[i, start:stop, : len(offsets)] = x[start:stop].float() @ a.T
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
) -> None:
    """See `kernels.lora.LoraExpand`."""
    check_lora(y, "y", arena, descriptors, layer, num_sites)
    check_sites(sites, num_sites)
    check_expand(y, h, segments, sites, spans)
    check_segment_rows("y", y.shape[0], int(segments.offsets[-1]))
    for i, (site, (first, width)) in enumerate(zip(sites, spans, strict=True)):
        for start, stop, number in _adapter_segments(segments):
            _, offsets, scale = _read_record(descriptors, number, layer, site, num_sites)
            if offsets:
                b = _rows(arena, offsets, width, y.dtype)  # [r, N]
                delta = scale * (h[i, start:stop, : len(offsets)] @ b)
                target = y[start:stop, first : first + width]
                target.copy_(target.float() + delta)


def lora_add_(
    y: Tensor,
    x: Tensor,
    arena: Tensor,
    descriptors: Tensor,
    segments: LoraSegments,
    *,
    layer: int,
    sites: tuple[int, ...],
    num_sites: int,
    spans: tuple[tuple[int, int], ...],
) -> None:
    """See `kernels.lora.LoraAdd`."""
    memory = (arena, descriptors, segments)
    h = lora_shrink(x, *memory, layer=layer, sites=sites, num_sites=num_sites)
    lora_expand_(y, h, *memory, layer=layer, sites=sites, num_sites=num_sites, spans=spans)


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
    """See `kernels.lora.LoraAffine`."""
    check_lora(y, "y", arena, descriptors, layer, num_sites)
    check_sites(sites, num_sites)
    check_affine(y, sites, spans, bias)
    check_segment_rows("y", y.shape[0], int(segments.offsets[-1]))
    for site, (first, width) in zip(sites, spans, strict=True):
        columns = slice(first, first + width)
        base = y.new_zeros(width) if bias is None else bias[columns]
        for start, stop, number in _adapter_segments(segments):
            gain, own = _read_affine(descriptors, number, layer, site, num_sites)
            values = y[start:stop, columns].float()
            if gain >= 0:
                (row,) = _rows(arena, [gain], width, torch.float32)
                values = (values - base.float()) * row + base.float()
            if own >= 0:
                values = values + _rows(arena, [own], width, torch.float32)
            y[start:stop, columns] = values.to(y.dtype)


def _read_affine(
    descriptors: Tensor, number: int, layer: int, site: int, num_sites: int
) -> tuple[int, int]:
    """Return the byte offsets of the gain and of the bias row; -1: there is none."""
    at = number + 2 * (layer * num_sites + site)
    head = int(descriptors[at])
    first, rank = number + (head >> 16), head & 0xFFFF
    gain, own = descriptors[first + 2 * rank : first + 2 * rank + 2].tolist() if rank else (-1, -1)
    return gain, own


def _adapter_segments(segments: LoraSegments) -> Iterator[tuple[int, int, int]]:
    """Yield (first row, end row, descriptor number) of each segment that has an adapter."""
    bounds: list[int] = segments.offsets.tolist()
    for start, stop, number in zip(bounds, bounds[1:], segments.descriptors.tolist(), strict=False):
        if number >= 0:
            yield start, stop, number


def _read_record(
    descriptors: Tensor, number: int, layer: int, site: int, num_sites: int
) -> tuple[list[int], list[int], float]:
    """Return (byte offsets of A's rows, of B's columns, scale) of one site of one adapter."""
    at = number + 2 * (layer * num_sites + site)
    head, bits = descriptors[at : at + 2].tolist()
    first, rank = head >> 16, head & 0xFFFF
    words: list[int] = descriptors[number + first : number + first + 2 * rank].tolist()
    (scale,) = struct.unpack("<d", struct.pack("<q", bits))
    return words[:rank], words[rank:], scale


def _rows(arena: Tensor, offsets: list[int], width: int, dtype: torch.dtype) -> Tensor:
    """Return float32 [len(offsets), width], the rank-rows at these byte offsets."""
    size = width * dtype.itemsize
    return torch.stack([arena[o : o + size].view(dtype).float() for o in offsets])


__all__ = ["lora_add_", "lora_affine_", "lora_expand_", "lora_shrink"]
