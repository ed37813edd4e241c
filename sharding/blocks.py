"""Cut packed 4-bit codes and their block scales out of a flattened matrix, vectorised.

Legend: the whole matrix is [_, K] with K = ``width``, flattened row by row; element e has its code
in byte e // 2 (even e in the high nibble) and its scale in block e // blocksize. A cut takes n
rows and k columns of it. Rows may begin inside a byte and inside a block; nothing is re-quantised.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import torch

from kernels.nf4 import NF4Weight
from sharding.units import Span

__all__ = ["CHUNK_ELEMENTS", "ByteReader", "cut_packed", "row_chunks", "stack_rows"]

CHUNK_ELEMENTS: Final = 1 << 22
"""Elements of the whole matrix that are handled at a time: bounds the memory beside the shard."""

ByteReader = Callable[[int, int], torch.Tensor]
"""Packed bytes ``start:stop`` of the whole matrix as uint8."""


def row_chunks(rows: Span, width: int) -> Iterator[Span]:
    """Split rows into runs of about `CHUNK_ELEMENTS` elements of the whole matrix."""
    step = max(1, CHUNK_ELEMENTS // max(1, width))
    for start in range(rows.start, rows.stop, step):
        yield Span(start, min(start + step, rows.stop))


def cut_packed(
    read: ByteReader,
    absmax: torch.Tensor,
    *,
    width: int,
    rows: Span,
    cols: Span,
    blocksize: int,
    first_block: int = 0,
) -> NF4Weight:
    """Canonical shard of rows and columns.

    Args:
        read: the packed codes; only bytes that the rows touch are asked for.
        absmax: float32, one a block of the whole matrix, beginning with block ``first_block``.
        width: columns K of the whole matrix.
        rows: rows to take.
        cols: columns to take.
        blocksize: elements a block.
        first_block: see ``absmax``.
    """
    codes = torch.empty(rows.size, (cols.size + 1) // 2, dtype=torch.uint8)
    if cols.size:
        for chunk in row_chunks(rows, width):
            at = chunk.start - rows.start
            _cut_codes(read, width, chunk, cols, codes[at : at + chunk.size])
    starts = torch.arange(rows.start, rows.stop) * width + cols.start  # [n]
    phase = starts % blocksize
    return NF4Weight(
        codes=codes,
        absmax=_gather_absmax(
            absmax, starts // blocksize - first_block, phase, cols.size, blocksize
        ),
        phase=phase.to(torch.int32),
        columns=cols.size,
        blocksize=blocksize,
    )


def _cut_codes(read: ByteReader, width: int, rows: Span, cols: Span, out: torch.Tensor) -> None:
    """Re-align the codes of some rows into ``out`` [n, ceil(k / 2)]."""
    first = rows.start * width + cols.start
    last = (rows.stop - 1) * width + cols.stop  # one past
    base = first // 2
    raw = read(base, (last + 1) // 2)
    # Rows lie a whole number of bytes apart if the width is even; every other row does if not.
    step = 1 + width % 2
    for lead in range(min(step, rows.size)):
        start = first + lead * width - 2 * base  # in nibbles of raw
        _copy_nibbles(raw[start // 2 :], start % 2, step * width // 2, cols.size, out[lead::step])


def _copy_nibbles(raw: torch.Tensor, odd: int, stride: int, size: int, out: torch.Tensor) -> None:
    """Copy ``size`` nibbles a row, rows ``stride`` bytes apart, beginning at nibble ``odd``."""
    count = (odd + size + 1) // 2  # bytes a row touches
    view = raw.as_strided((out.shape[0], count), (stride, 1), raw.storage_offset())
    if not odd:
        out.copy_(view)
    else:
        torch.bitwise_left_shift(view[:, : out.shape[1]], 4, out=out)
        out[:, : count - 1] |= view[:, 1:] >> 4
    if size % 2:
        out[:, -1] &= 0xF0  # the unused half of a row's last byte is always zero


def _gather_absmax(
    absmax: torch.Tensor, first: torch.Tensor, phase: torch.Tensor, size: int, blocksize: int
) -> torch.Tensor:
    """Scales [n, M] of the blocks that each row touches; zero where it touches fewer than M."""
    if not first.numel() or not size:
        return torch.empty(first.numel(), 0, dtype=torch.float32)
    touched = (phase + size - 1) // blocksize + 1  # [n]
    place = torch.arange(int(touched.max()))  # [M]
    index = (first[:, None] + place).clamp_(max=absmax.numel() - 1)
    return absmax[index].masked_fill_(place >= touched[:, None], 0.0)


def stack_rows(parts: Sequence[NF4Weight]) -> NF4Weight:
    """Put shards with equal columns on top of one another, as fused QKV and gate/up need it.

    Raises:
        ValueError: if there are no parts, or they differ in columns or block size.
    """
    kinds = {(part.columns, part.blocksize) for part in parts}
    if len(kinds) != 1:
        raise ValueError(f"parts must agree in (columns, blocksize), got {sorted(kinds)}")
    blocks = max(part.absmax.shape[1] for part in parts)
    absmax = [
        torch.nn.functional.pad(part.absmax, (0, blocks - part.absmax.shape[1])) for part in parts
    ]
    return NF4Weight(
        codes=torch.cat([part.codes for part in parts]),
        absmax=torch.cat(absmax),
        phase=torch.cat([part.phase for part in parts]),
        columns=parts[0].columns,
        blocksize=parts[0].blocksize,
    )
