"""Gains and biases of adapters on CPU: one gather of rows a site and kind, whatever the mix."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.checks import check_affine, check_segment_rows
from kernels.lora import LoraBatch, LoraTarget
from kernels.lora.batches import ROW_ALIGNMENT

Words = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _AdapterRows:
    """The rows of a step that have an adapter."""

    total: int
    """Rows of the step."""
    rows: Words
    """[R]."""
    numbers: Words
    """[R], the descriptor number of each."""
    words: Words
    """All records."""


def lora_affine_(y: Tensor, batch: LoraBatch, target: LoraTarget, bias: Tensor | None) -> None:
    """See `kernels.lora.LoraAffine`; element by element, so no row depends on another."""
    check_affine(y, target, bias)
    step = _adapter_rows(batch)
    check_segment_rows("y", y.shape[0], step.total)
    for head, (start, width) in zip(target.heads, target.spans, strict=True):
        gains, owns = _offsets(step, head)
        having = (gains >= 0) | (owns >= 0)
        if width == 0 or not having.any():
            continue
        rows = torch.from_numpy(step.rows[having])
        columns = slice(start, start + width)
        values = y[rows, columns].float()  # [R, width]
        _scale_(values, None if bias is None else bias[columns].float(), batch.arena, gains[having])
        _add_(values, batch.arena, owns[having])
        y[rows, columns] = values.to(y.dtype)


def _scale_(values: Tensor, base: Tensor | None, arena: Tensor, offsets: Words) -> None:
    """values [R, width] = (values - base) * gain + base, in rows whose offset is not negative."""
    chosen = torch.from_numpy(np.flatnonzero(offsets >= 0))
    if chosen.numel():
        part = values[chosen]
        part = part if base is None else part - base
        part = part * _float_rows(arena, offsets[offsets >= 0], values.shape[1])
        values[chosen] = part if base is None else part + base


def _add_(values: Tensor, arena: Tensor, offsets: Words) -> None:
    """values [R, width] += bias row, in rows whose offset is not negative."""
    chosen = torch.from_numpy(np.flatnonzero(offsets >= 0))
    if chosen.numel():
        values[chosen] += _float_rows(arena, offsets[offsets >= 0], values.shape[1])


def _float_rows(arena: Tensor, offsets: Words, width: int) -> Tensor:
    """float32 [R, width], the rows at these byte offsets."""
    unit = ROW_ALIGNMENT // 4
    elements = arena[: arena.numel() // 4 * 4].view(torch.float32)
    count = (elements.numel() - width) // unit + 1
    places = elements.as_strided((count, width), (unit, 1))
    return places.index_select(0, torch.from_numpy(offsets // ROW_ALIGNMENT))


def _adapter_rows(batch: LoraBatch) -> _AdapterRows:
    """Found once a step and table of records."""
    segments, key = batch.segments, ("affine", batch.descriptors.data_ptr())
    found = segments.memo.get(key)
    if not isinstance(found, _AdapterRows):
        numbers = segments.descriptors.numpy().repeat(np.diff(segments.offsets.numpy()))
        rows = np.flatnonzero(numbers >= 0)
        found = segments.memo[key] = _AdapterRows(
            total=numbers.size, rows=rows, numbers=numbers[rows], words=batch.descriptors.numpy()
        )
    return found


def _offsets(step: _AdapterRows, head: int) -> tuple[Words, Words]:
    """[R] each: the byte offsets of gain and bias row of the site with this head; -1: none."""
    heads = step.words[step.numbers + head]
    ranks = heads & 0xFFFF
    at = step.numbers + (heads >> 16) + 2 * ranks
    # A site without a rank has no offsets: read the head itself, and ignore it.
    at = np.where(ranks > 0, at, step.numbers)
    gains, owns = step.words[at], step.words[at + 1]
    return np.where(ranks > 0, gains, -1), np.where(ranks > 0, owns, -1)


__all__ = ["lora_affine_"]
