"""Cut an adapter for every rank and pack its rows into page images.

Legend: n pages of an image, W words of a record, r LoRA rank of a module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from sharding import TOP, ModelDims, RankCut, WeightSlice, cut_lora, weight_slice
from tp_engine.adapters.ends.layout import end_groups, end_matrices
from tp_engine.adapters.ends.packing import cast_replaced, fill_ends
from tp_engine.adapters.layout import ROW_DTYPE, GroupKey, Run, Side, groups_of, place_rows
from tp_engine.adapters.record import NO_ROW, SiteRows, build_record
from tp_engine.adapters.revision import AdapterRevision, LoraModule
from tp_engine.adapters.rows import cast_finite, copy_rows
from tp_engine.adapters.targets import Place, module_name
from tp_engine.interpreter import giving_way
from tp_engine.shortage import asking_for
from tp_engine.tiers.host_memory import zeroed_pages


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AdapterImage:
    """What one rank copies into its arena to make an adapter resident."""

    pages: Tensor
    """uint8 [n, page_bytes]; bytes that hold no row are 0."""
    record: Tensor
    """int64 [W], with offsets into ``pages`` (see `tp_engine.adapters.record`)."""
    row_bytes: int = 0
    """Of all rows, where it was packed; the rest of its pages is waste."""


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
        AdapterError: ``not_finite``, if a value is too large for ``dtype``; `OutOfMemory`.
        ValueError: see `tp_engine.adapters.layout.place_rows`.
    """
    placed = [_place(revision, cut, dims, dtype, page_bytes) for cut in cuts]
    count = max(pages for _, pages in placed)
    with asking_for(f"page images for {len(cuts)} ranks", len(cuts) * count * page_bytes):
        return _images(revision, cuts, dims, dtype, placed, (count, page_bytes))


def _images(
    revision: AdapterRevision,
    cuts: Sequence[RankCut],
    dims: ModelDims,
    dtype: torch.dtype,
    placed: Sequence[tuple[list[Run], int]],
    size: tuple[int, int],
) -> list[AdapterImage]:
    """Fill images of one ``size``, [n, page_bytes], with the runs ``placed`` in them by rank."""
    modules = {
        place: _cast(place, module, dtype) for place, module in giving_way(revision.modules.items())
    }
    replaced = cast_replaced(revision.replaced, dtype)
    images = []
    for cut, (runs, _) in zip(cuts, placed, strict=True):
        pages = zeroed_pages(*size)
        by_key: dict[GroupKey, list[Run]] = {}
        for run in runs:
            by_key.setdefault(run.group.key, []).append(run)
        record = _fill(modules, cut, dims, by_key, pages)
        record = fill_ends(record, modules, replaced, cut.vocab, dims.layers, by_key, pages)
        used = sum(run.count * run.group.row_bytes for run in runs)
        images.append(AdapterImage(pages=pages, record=record, row_bytes=used))
    return _equal_words(images)


def _place(
    revision: AdapterRevision,
    cut: RankCut,
    dims: ModelDims,
    dtype: torch.dtype,
    page_bytes: int,
) -> tuple[list[Run], int]:
    every = giving_way(revision.modules.items())
    modules = {place: module.rows for place, module in every if place[0] != TOP}
    ends = end_matrices(revision.modules, revision.replaced, cut.vocab)
    of_layers = groups_of(modules, cut, dims, dtype)
    return place_rows([*of_layers, *end_groups(ends, dtype, page_bytes)], page_bytes)


def _cast(place: Place, module: LoraModule, dtype: torch.dtype) -> LoraModule:
    """The module in the dtypes of its rows; rounding is expected, overflow is not."""
    bias = None if module.bias is None else module.bias.double() * module.scale
    name = module_name(*place)
    bias_name = f"the bias of lora_B of {name}"
    return LoraModule(
        a=cast_finite(f"lora_A of {name}", module.a, dtype),
        b=cast_finite(f"lora_B of {name}", module.b, dtype),
        scale=module.scale,
        magnitude=None if module.magnitude is None else module.magnitude.to(ROW_DTYPE),
        bias=None if bias is None else cast_finite(bias_name, bias, ROW_DTYPE),
    )


def _fill(
    modules: Mapping[Place, LoraModule],
    cut: RankCut,
    dims: ModelDims,
    runs: Mapping[GroupKey, Sequence[Run]],
    pages: Tensor,
) -> Tensor:
    """Copy one rank's rows of the layers into its zeroed pages [n, page_bytes]; the record."""
    sites = {}
    for place, module in modules.items():
        if place[0] == TOP:
            continue
        offsets = {
            side: copy_rows(rows, runs.get((*place, side), []), pages)
            for side, rows in _rows(
                place, module, cut.rank, weight_slice(dims, cut.layers[place[0]], place[1])
            ).items()
        }
        sites[place] = SiteRows(
            a_offsets=offsets["A"],
            b_offsets=offsets["B"],
            scale=module.scale,
            gain_offset=int(offsets["gain"]) if "gain" in offsets else NO_ROW,
            bias_offset=int(offsets["bias"]) if "bias" in offsets else NO_ROW,
        )
    return build_record(dims.layers, sites)


def _rows(place: Place, module: LoraModule, rank: int, part: WeightSlice) -> dict[Side, Tensor]:
    """What one rank holds of a module, as rows [n, width]."""
    a, b = cut_lora(module.a, module.b, part)  # [r, |cols|], [|rows|, r]
    rows: dict[Side, Tensor] = {"A": a, "B": b.T}
    if module.magnitude is not None:
        rows["gain"] = module.magnitude[None, part.rows.slice]
    if module.bias is not None and module.rows.on_rank(place[1], rank).bias:
        rows["bias"] = module.bias[None, part.rows.slice]
    return rows


def _equal_words(images: Sequence[AdapterImage]) -> list[AdapterImage]:
    """The images with records of one length: ranks hold different numbers of vocabulary rows."""
    words = max(image.record.numel() for image in images)
    return [
        AdapterImage(
            pages=image.pages,
            record=pad(image.record, (0, words - image.record.numel()), value=NO_ROW),
            row_bytes=image.row_bytes,
        )
        for image in images
    ]
