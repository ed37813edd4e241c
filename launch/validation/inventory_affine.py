"""Gains and biases that a rank holds of an adapter, as entries to compare.

A gain is known to the last bit but one: norms of a row's parts are added in another order than the
norm of the whole row.

Legend: N out-features of a module, n rows that are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from launch.validation.entry import Entry, Kind
from launch.validation.live import Cell, LiveError, bits_of
from launch.validation.live_lora import LiveRecord
from launch.validation.whole import WholeSource
from sharding import Span, WeightSlice
from tp_engine.adapters import LoraModule
from tp_engine.adapters.layout import ROW_DTYPE
from tp_engine.adapters.targets import module_name

GAIN_ULPS = 1
"""By how many units in the last place a gain may differ."""
_ONE = Span(0, 1)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AffineRow:
    """A module's gain row or bias row in the arena, as a column [N, 1]."""

    record: LiveRecord
    layer: int
    site: int
    kind: Literal["gain", "bias"]
    rank: int
    """LoRA rank of the module."""
    width: int
    """N on this rank."""
    slack: int = 0
    """Lowest bits of an element whose damage would not show."""

    def read(self, rows: Span) -> Tensor:
        """Its elements."""
        size = ROW_DTYPE.itemsize
        start = self._offset() + rows.start * size
        raw = self.record.arena.memory[start : start + rows.size * size].cpu()
        return raw.view(ROW_DTYPE)[:, None]

    def cell(self, row: int, col: int) -> Cell:
        """In the arena."""
        bits = 8 * ROW_DTYPE.itemsize
        first = 8 * (self._offset() + row * ROW_DTYPE.itemsize)
        memory = self.record.arena.memory
        return Cell(bits=bits_of(memory, first + self.slack, bits - self.slack))

    def _offset(self) -> int:
        offset = self.record.affine_offsets(self.layer, self.site, self.rank)[self.kind == "bias"]
        last = self.record.arena.memory.numel() - self.width * ROW_DTYPE.itemsize
        if not 0 <= offset <= last:
            raise LiveError(f"its record has the {self.kind} row at {offset}")
        return offset


def affine_entries(
    record: LiveRecord,
    place: tuple[int, int],
    module: LoraModule,
    name: str,
    part: WeightSlice,
    bias_rows: Span,
    source: WholeSource,
    dtype: torch.dtype,
) -> Iterator[Entry]:
    """A module's gain and bias, if it has such.

    Args:
        record: of the adapter.
        place: (layer, site).
        module: what the adapter's files hold of it.
        name: of the adapter.
        part: of the base's weight on this rank.
        bias_rows: of the bias on this rank.
        source: the base's files.
        dtype: of A and B in the arena.
    """
    layer, site = place
    stem, entry = module_name(*place), partial(Entry, layer=layer, vector=True)
    row = partial(AffineRow, record=record, layer=layer, site=site, rank=module.rank)
    shape = (module.b.shape[0], 1)
    if module.magnitude is not None:
        yield entry(
            name=f"{name}: {stem}.gain",
            kind=Kind.GAIN,
            shape=shape,
            part=WeightSlice(rows=part.rows, cols=_ONE),
            live=row(kind="gain", width=part.rows.size, slack=GAIN_ULPS.bit_length()),
            whole=_gains(f"{stem}.weight", module, source, dtype),
            ulps=GAIN_ULPS,
        )
    if module.bias is not None:
        bias = (module.bias.double() * module.scale).float()[:, None]
        yield entry(
            name=f"{name}: {stem}.lora_B.bias",
            kind=Kind.LORA_BIAS,
            shape=shape,
            part=WeightSlice(rows=bias_rows, cols=_ONE),
            live=row(kind="bias", width=bias_rows.size),
            whole=lambda rows: bias[rows.slice],
        )


def _gains(
    name: str, module: LoraModule, source: WholeSource, dtype: torch.dtype
) -> Callable[[Span], Tensor]:
    """Magnitude / norm of the unsharded rows of W + scale * B A: float32 [n, 1]."""
    assert module.magnitude is not None
    a, b = module.a.to(dtype).double(), module.b.to(dtype).double()
    magnitude = module.magnitude.double()

    def whole(rows: Span) -> Tensor:
        if source.is_packed(name, linear=True):
            weight = source.packed(name).values(rows, torch.float32)
        else:
            weight = source.plain(name, rows)
        adapted = weight.double() + module.scale * (b[rows.slice] @ a)
        norms = torch.linalg.norm(adapted, dim=1)
        gains = torch.where(norms > 0, magnitude[rows.slice] / norms, 0.0)
        return gains.float()[:, None]

    return whole
