"""Quantise while loading: only the blocks that a rank's slice touches, the same codes as the whole.

Blocks run over the flattened whole weight, so a slice is widened to block boundaries, quantised,
then cut: quantising and sharding commute, bit for bit.
"""

from typing import Protocol

import torch

from kernels.dispatch import ops_for
from kernels.nf4 import NF4Weight
from sharding.blocks import cut_packed, row_chunks, stack_rows
from sharding.units import Span

__all__ = ["MatrixSource", "quantize_slice"]


class MatrixSource(Protocol):
    """A matrix that can be read in part; `sharding.stored.StoredTensor` is one."""

    @property
    def name(self) -> str:
        """What to call it in errors."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """[out, in]."""
        ...

    def read_slice(self, rows: Span, cols: Span | None = None) -> torch.Tensor:
        """Rows and columns as a tensor [|rows|, |cols|]."""
        ...


def quantize_slice(
    source: MatrixSource, rows: Span, cols: Span, *, blocksize: int = 64
) -> NF4Weight:
    """NF4 shard of a full-precision weight.

    Equals the same cut of the whole weight quantised by bitsandbytes. Reads and quantises a
    bounded number of rows at a time, and of them the touched blocks only (whole rows where the
    width is no multiple of the block size, since blocks then cross rows).

    Raises:
        ValueError: if the source is no floating-point matrix, holds NaN or infinity in a touched
            block, or a span leaves it; or if ``blocksize`` is not even and positive.
    """
    if len(source.shape) != 2:
        raise ValueError(f"{source.name}: shape {list(source.shape)} must be [out, in]")
    if rows.stop > source.shape[0] or cols.stop > source.shape[1]:
        raise ValueError(
            f"{source.name}: rows {rows.start}:{rows.stop}, cols {cols.start}:{cols.stop} leave "
            f"the shape {list(source.shape)}"
        )
    if blocksize < 2 or blocksize % 2:
        raise ValueError(f"blocksize={blocksize} must be even and positive")
    if not rows.size or not cols.size:
        return NF4Weight(
            codes=torch.empty(rows.size, (cols.size + 1) // 2, dtype=torch.uint8),
            absmax=torch.empty(rows.size, 0),
            phase=torch.zeros(rows.size, dtype=torch.int32),
            columns=cols.size,
            blocksize=blocksize,
        )
    part = _quantize_aligned if source.shape[1] % blocksize == 0 else _quantize_crossing
    return stack_rows(
        [part(source, chunk, cols, blocksize) for chunk in row_chunks(rows, source.shape[1])]
    )


def _quantize_aligned(source: MatrixSource, rows: Span, cols: Span, blocksize: int) -> NF4Weight:
    """Blocks stay inside rows: widen the columns to blocks and quantise that narrower matrix."""
    start = cols.start // blocksize * blocksize
    wide = Span(start, -(-cols.stop // blocksize) * blocksize)
    codes, absmax = _quantize(source.name, source.read_slice(rows, wide), blocksize)
    return cut_packed(
        lambda begin, end: codes[begin:end],
        absmax,
        width=wide.size,
        rows=Span(0, rows.size),
        cols=Span(cols.start - start, cols.stop - start),
        blocksize=blocksize,
    )


def _quantize_crossing(source: MatrixSource, rows: Span, cols: Span, blocksize: int) -> NF4Weight:
    """Blocks cross rows: widen the flat range of the rows to blocks."""
    width = source.shape[1]
    first = rows.start * width // blocksize
    last = -(-rows.stop * width // blocksize)  # one past
    start, stop = first * blocksize, min(last * blocksize, source.shape[0] * width)
    wide = Span(start // width, -(-stop // width))
    flat = source.read_slice(wide).flatten()
    base = wide.start * width
    codes, absmax = _quantize(source.name, flat[start - base : stop - base], blocksize)
    return cut_packed(
        lambda begin, end: codes[begin - start // 2 : end - start // 2],
        absmax,
        width=width,
        rows=rows,
        cols=cols,
        blocksize=blocksize,
        first_block=first,
    )


def _quantize(name: str, values: torch.Tensor, blocksize: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed codes and scales of whole blocks; float16 and bfloat16 widen to float32 exactly."""
    if not values.is_floating_point():
        raise ValueError(f"{name}: {values.dtype} must be floating point")
    try:
        return ops_for(values.device).quantize_blocks(values.float().flatten(), blocksize)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
