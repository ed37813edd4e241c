"""LoRA deltas in plain torch, one segment and site at a time: the truth for every other
implementation."""

import struct
from collections.abc import Iterator

import torch
from torch import Tensor

from kernels.checks import check_affine, check_expand, check_lora_input, check_segment_rows
from kernels.lora import LoraBatch, LoraSegments, LoraTarget
from kernels.lora.composed import lora_add_of


def lora_shrink(x: Tensor, batch: LoraBatch, target: LoraTarget) -> Tensor:
    """See `kernels.lora.LoraShrink`."""
    check_lora_input(x)
    segments = batch.segments
    check_segment_rows("x", x.shape[0], int(segments.offsets[-1]))
    h = x.new_zeros((len(target.sites), x.shape[0], segments.max_rank), dtype=torch.float32)
    for i, head in enumerate(target.heads):
        for start, stop, number in _adapter_segments(segments):
            offsets, _, _ = _read_record(batch.descriptors, number, head)
            if len(offsets) > segments.max_rank:
                raise ValueError(
                    f"segments.max_rank must be >= {len(offsets)}, the rank of an adapter in "
                    f"layer {target.layer}, got {segments.max_rank}"
                )
            if offsets:
                a = _rows(batch.arena, offsets, x.shape[1], x.dtype)  # [r, K]
                h[i, start:stop, : len(offsets)] = x[start:stop].float() @ a.T
    return h


def lora_expand_(y: Tensor, h: Tensor, batch: LoraBatch, target: LoraTarget) -> None:
    """See `kernels.lora.LoraExpand`."""
    check_expand(y, h, batch, target)
    segments = batch.segments
    check_segment_rows("y", y.shape[0], int(segments.offsets[-1]))
    for i, (head, (first, width)) in enumerate(zip(target.heads, target.spans, strict=True)):
        for start, stop, number in _adapter_segments(segments):
            _, offsets, scale = _read_record(batch.descriptors, number, head)
            if offsets:
                b = _rows(batch.arena, offsets, width, y.dtype)  # [r, N]
                delta = scale * (h[i, start:stop, : len(offsets)] @ b)
                written = y[start:stop, first : first + width]
                written.copy_(written.float() + delta)


lora_add_ = lora_add_of(lora_shrink, lora_expand_)


def lora_affine_(y: Tensor, batch: LoraBatch, target: LoraTarget, bias: Tensor | None) -> None:
    """See `kernels.lora.LoraAffine`."""
    check_affine(y, target, bias)
    segments = batch.segments
    check_segment_rows("y", y.shape[0], int(segments.offsets[-1]))
    for head, (first, width) in zip(target.heads, target.spans, strict=True):
        columns = slice(first, first + width)
        base = y.new_zeros(width) if bias is None else bias[columns]
        for start, stop, number in _adapter_segments(segments):
            gain, own = _read_affine(batch.descriptors, number, head)
            values = y[start:stop, columns].float()
            if gain >= 0:
                (row,) = _rows(batch.arena, [gain], width, torch.float32)
                values = (values - base.float()) * row + base.float()
            if own >= 0:
                values = values + _rows(batch.arena, [own], width, torch.float32)
            y[start:stop, columns] = values.to(y.dtype)


def _read_affine(descriptors: Tensor, number: int, head: int) -> tuple[int, int]:
    """Return the byte offsets of the gain and of the bias row; -1: there is none."""
    word = int(descriptors[number + head])
    first, rank = number + (word >> 16), word & 0xFFFF
    gain, own = descriptors[first + 2 * rank : first + 2 * rank + 2].tolist() if rank else (-1, -1)
    return gain, own


def _adapter_segments(segments: LoraSegments) -> Iterator[tuple[int, int, int]]:
    """Yield (first row, end row, descriptor number) of each segment that has an adapter."""
    bounds: list[int] = segments.offsets.tolist()
    for start, stop, number in zip(bounds, bounds[1:], segments.descriptors.tolist(), strict=False):
        if number >= 0:
            yield start, stop, number


def _read_record(descriptors: Tensor, number: int, head: int) -> tuple[list[int], list[int], float]:
    """Return (byte offsets of A's rows, of B's columns, scale) of one site of one adapter."""
    word, bits = descriptors[number + head : number + head + 2].tolist()
    first, rank = word >> 16, word & 0xFFFF
    words: list[int] = descriptors[number + first : number + first + 2 * rank].tolist()
    (scale,) = struct.unpack("<d", struct.pack("<q", bits))
    return words[:rank], words[rank:], scale


def _rows(arena: Tensor, offsets: list[int], width: int, dtype: torch.dtype) -> Tensor:
    """Return float32 [len(offsets), width], the rank-rows at these byte offsets."""
    size = width * dtype.itemsize
    return torch.stack([arena[o : o + size].view(dtype).float() for o in offsets])


__all__ = ["lora_add_", "lora_affine_", "lora_expand_", "lora_shrink"]
