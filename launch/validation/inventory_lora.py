"""Everything that a rank holds of the adapters, as entries to compare."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from launch.validation.entry import TOP, Entry, Kind
from launch.validation.inventory_affine import affine_entries
from launch.validation.inventory_ends import end_entries
from launch.validation.live_lora import Heads, LiveRecord, RankRows
from launch.validation.whole import WholeSource
from sharding import SITES, Span, WeightSlice, is_row_parallel, weight_slice
from tp_engine.adapters import AdapterRevision, LoraModule
from tp_engine.adapters.targets import module_name
from tp_engine.rank import Rank


def adapter_entries(
    rank: Rank,
    adapters: Mapping[str, AdapterRevision],
    descriptors: Mapping[str, int],
    source: WholeSource,
) -> list[Entry]:
    """All rows and words of the resident adapters on one rank; names of one revision share
    them, so it is listed under the first.

    Args:
        rank: live.
        adapters: names and what their files hold, unsharded.
        descriptors: by revision digest, where the records begin.
        source: the base's files.
    """
    entries = []
    firsts = {revision.digest: name for name, revision in reversed(list(adapters.items()))}
    for name, revision in adapters.items():
        if firsts[revision.digest] != name:
            continue
        record = LiveRecord(
            arena=rank.worker.runner.arena,
            descriptor=descriptors[revision.digest],
            layers=rank.dims.layers,
        )
        entries += list(_entries_of(rank, name, revision, record, source))
        entries += list(end_entries(rank, name, revision, record.descriptor))
    return entries


def _entries_of(
    rank: Rank, name: str, revision: AdapterRevision, record: LiveRecord, source: WholeSource
) -> Iterator[Entry]:
    ranks, scales = _expected_words(revision, record.layers)
    yield _words(name, Kind.RANK, record, ranks)
    yield _words(name, Kind.SCALE, record, scales)
    for (layer, site), module in revision.modules.items():
        if layer == TOP:
            continue  # see `end_entries`
        part = weight_slice(rank.dims, rank.cuts[rank.comm.rank].layers[layer], site)
        stem = f"{name}: {module_name(layer, site)}"
        entry = partial(_rows, record, layer, site, module, rank.layout.dtype)
        yield entry("A", f"{stem}.lora_A", WeightSlice(rows=Span(0, module.rank), cols=part.cols))
        yield entry("B", f"{stem}.lora_B", WeightSlice(rows=part.rows, cols=Span(0, module.rank)))
        added = rank.comm.rank == 0 or not is_row_parallel(site)
        yield from affine_entries(
            record,
            (layer, site),
            module,
            name,
            part,
            part.rows if added else Span(0, 0),
            source,
            rank.layout.dtype,
        )


def _rows(
    record: LiveRecord,
    layer: int,
    site: int,
    module: LoraModule,
    dtype: torch.dtype,
    side: Literal["A", "B"],
    name: str,
    part: WeightSlice,
) -> Entry:
    stored, width = (module.a, part.cols.size) if side == "A" else (module.b, part.rows.size)
    return Entry(
        name=name,
        kind=Kind.LORA_A if side == "A" else Kind.LORA_B,
        layer=layer,
        shape=(stored.shape[0], stored.shape[1]),
        part=part,
        live=RankRows(
            record=record,
            layer=layer,
            site=site,
            side=side,
            rank=module.rank,
            width=width,
            dtype=dtype,
        ),
        whole=lambda rows: stored[rows.slice].to(dtype),
    )


def _words(name: str, kind: Kind, record: LiveRecord, expected: Tensor) -> Entry:
    layers, sites = expected.shape
    return Entry(
        name=f"{name}: {kind.value} by layer and site",
        kind=kind,
        layer=TOP,
        shape=(layers, sites),
        part=WeightSlice(rows=Span(0, layers), cols=Span(0, sites)),
        live=Heads(record=record, word="rank" if kind is Kind.RANK else "scale"),
        whole=lambda rows: expected[rows.slice],
    )


def _expected_words(revision: AdapterRevision, layers: int) -> tuple[Tensor, Tensor]:
    """[layers, sites]: LoRA ranks int64, and scales float64."""
    ranks = torch.zeros((layers, len(SITES)), dtype=torch.int64)
    scales = torch.zeros((layers, len(SITES)), dtype=torch.float64)
    for (layer, site), module in revision.modules.items():
        if layer != TOP:
            ranks[layer, site] = module.rank
            scales[layer, site] = module.scale
    return ranks, scales
