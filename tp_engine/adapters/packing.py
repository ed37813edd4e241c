"""Cut an adapter for every rank and pack its rows into page images.

Legend: n pages of an image, W words of a record, r LoRA rank of a module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sharding import ModelDims, RankCut, WeightSlice, cut_lora, module_slice
from tp_engine.adapters.errors import AdapterError
from tp_engine.adapters.layout import ROW_DTYPE, GroupKey, Run, Side, groups_of, place_rows
from tp_engine.adapters.record import NO_ROW, SiteRows, build_record
from tp_engine.adapters.revision import AdapterRevision, LoraModule
from tp_engine.adapters.targets import Place, module_name


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AdapterImage:
    """What one rank copies into its arena to make an adapter resident."""

    pages: Tensor
    """uint8 [n, page_bytes]; bytes that hold no row are 0."""
    record: Tensor
    """int64 [W], with offsets into ``pages`` (see `tp_engine.adapters.record`)."""


def pages_needed(
    revision: AdapterRevision,
    cuts: Sequence[RankCut],
    dims: ModelDims,
    dtype: torch.dtype,
    page_bytes: int,
) -> int:
    """Pages of the adapter's images: what the rank with the most needs.

    Raises:
        ValueError: see `tp_engine.adapters.layout.place_rows`.
    """
    return max(_place(revision, cut, dims, dtype, page_bytes)[1] for cut in cuts)


def pack_adapter(
    revision: AdapterRevision,
    cuts: Sequence[RankCut],
    dims: ModelDims,
    dtype: torch.dtype,
    page_bytes: int,
) -> list[AdapterImage]:
    """Page images of an adapter, one a rank, equal in number of pages and words.

    A gain row holds the module's magnitudes as yet. A bias row holds scale * bias.

    Args:
        cuts: of all ranks, in order.
        dtype: of activations; A and B are cast to it once, before they are cut.

    Raises:
        AdapterError: ``not_finite``, if a value is too large for ``dtype``.
        ValueError: see `tp_engine.adapters.layout.place_rows`.
    """
    placed = [_place(revision, cut, dims, dtype, page_bytes) for cut in cuts]
    count = max(pages for _, pages in placed)
    modules = {place: _cast(place, module, dtype) for place, module in revision.modules.items()}
    return [
        _fill(modules, cut, dims, runs, torch.zeros(count, page_bytes, dtype=torch.uint8))
        for cut, (runs, _) in zip(cuts, placed, strict=True)
    ]


def _place(
    revision: AdapterRevision,
    cut: RankCut,
    dims: ModelDims,
    dtype: torch.dtype,
    page_bytes: int,
) -> tuple[list[Run], int]:
    modules = {place: module.rows for place, module in revision.modules.items()}
    return place_rows(groups_of(modules, cut, dims, dtype), page_bytes)


def _cast(place: Place, module: LoraModule, dtype: torch.dtype) -> LoraModule:
    """The module in the dtypes of its rows; rounding is expected, overflow is not."""
    bias = None if module.bias is None else module.bias.double() * module.scale
    return LoraModule(
        a=_cast_finite(place, "A", module.a, dtype),
        b=_cast_finite(place, "B", module.b, dtype),
        scale=module.scale,
        magnitude=None if module.magnitude is None else module.magnitude.to(ROW_DTYPE),
        bias=None if bias is None else _cast_finite(place, "B bias", bias, ROW_DTYPE),
    )


def _cast_finite(place: Place, side: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    cast = tensor.to(dtype)
    if tensor.dtype != dtype and not bool(torch.isfinite(cast).all()):
        largest = float(tensor.abs().max())
        reason = f"lora_{side} of {module_name(*place)} has a value of magnitude {largest:g}"
        raise AdapterError("not_finite", f"{reason}, too large for {dtype}")
    return cast


def _fill(
    modules: Mapping[Place, LoraModule],
    cut: RankCut,
    dims: ModelDims,
    runs: Sequence[Run],
    pages: Tensor,
) -> AdapterImage:
    """Copy one rank's rows into its zeroed pages [n, page_bytes]."""
    by_key: dict[GroupKey, list[Run]] = {}
    for run in runs:
        by_key.setdefault(run.group.key, []).append(run)
    sites = {}
    for place, module in modules.items():
        offsets = {
            side: _copy_rows(rows, by_key.get((*place, side), []), pages)
            for side, rows in _rows(
                place, module, cut.rank, module_slice(dims, cut, *place)
            ).items()
        }
        sites[place] = SiteRows(
            a_offsets=offsets["A"],
            b_offsets=offsets["B"],
            scale=module.scale,
            gain_offset=int(offsets["gain"]) if "gain" in offsets else NO_ROW,
            bias_offset=int(offsets["bias"]) if "bias" in offsets else NO_ROW,
        )
    return AdapterImage(pages=pages, record=build_record(dims.layers, sites))


def _rows(place: Place, module: LoraModule, rank: int, part: WeightSlice) -> dict[Side, Tensor]:
    """What one rank holds of a module, as rows [n, width]."""
    a, b = cut_lora(module.a, module.b, part)  # [r, |cols|], [|rows|, r]
    rows: dict[Side, Tensor] = {"A": a, "B": b.T}
    if module.magnitude is not None:
        rows["gain"] = module.magnitude[None, part.rows.slice]
    if module.bias is not None and module.rows.on_rank(*place, rank).bias:
        rows["bias"] = module.bias[None, part.rows.slice]
    return rows


def _copy_rows(rows: Tensor, runs: Sequence[Run], pages: Tensor) -> Tensor:
    """Copy [r, width] to its places, one copy a run; the byte offsets int64 [r] of the rows.

    Rows without width have no run, and offset 0.
    """
    offsets = torch.zeros(rows.shape[0], dtype=torch.int64)
    for run in runs:
        start, stop = run.first, run.first + run.count
        row_bytes, stride = run.group.row_bytes, run.group.stride
        at = run.page * pages.shape[1] + run.offset
        target = pages.view(-1).as_strided((run.count, row_bytes), (stride, 1), at)
        target.copy_(rows[start:stop].contiguous().view(torch.uint8))
        offsets[start:stop] = at + stride * torch.arange(run.count)
    return offsets
