"""Everything that a rank holds of the adapters' changes at the model's two ends, to compare."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from launch.validation.entry import TOP, Entry, Kind
from launch.validation.live import Live
from launch.validation.live_ends import EndIds, EndMatrix, EndScale, LiveEnd
from sharding import VOCAB_SITES, Span, WeightSlice
from tp_engine.adapters import AdapterRevision
from tp_engine.adapters.ends.layout import end_matrices
from tp_engine.adapters.layout import EndRole
from tp_engine.adapters.targets import VOCAB_MODULES
from tp_engine.rank import Rank

_KINDS: dict[EndRole, Kind] = {
    "tokens": Kind.TOKEN_ROWS,
    "hidden": Kind.TOKEN_ROWS,
    "whole": Kind.REPLACED,
    "rows": Kind.REPLACED,
    "ids": Kind.REPLACED_IDS,
}


def end_entries(
    rank: Rank, name: str, revision: AdapterRevision, descriptor: int
) -> Iterator[Entry]:
    """All matrices of one resident adapter's ends on one rank, in the form in which it has them.

    Args:
        rank: live.
        name: of the adapter.
        revision: what its files hold, unsharded.
        descriptor: where its record begins.
    """
    vocab = rank.cuts[rank.comm.rank].vocab
    every = Span(0, rank.dims.vocab)
    for (end, role), matrix in end_matrices(revision.modules, revision.replaced, every).items():
        of = LiveEnd(resident=rank.worker.runner.ends, descriptor=descriptor, end=end)
        part = Span(0, len(matrix)) if role == "hidden" else vocab
        if role in ("rows", "ids"):
            part = _held(revision, end, vocab)
        live: Live = EndMatrix(
            of=of,
            role=role,
            rows=part.size,
            columns=matrix.shape[1],
            dtype=rank.layout.dtype,
        )
        if role == "ids":
            live = EndIds(of=of, first=vocab.start, count=part.size)
        stem = f"{name}: {VOCAB_MODULES[end]}"
        yield _entry(f"{stem}.{role}", _KINDS[role], matrix, part, live, rank.layout.dtype)
    for end in range(len(VOCAB_SITES)):
        module = revision.modules.get((TOP, end))
        if module is not None:
            of = LiveEnd(resident=rank.worker.runner.ends, descriptor=descriptor, end=end)
            scale = torch.tensor([[module.scale]], dtype=torch.float64)
            name_of = f"{name}: {VOCAB_MODULES[end]}.scale"
            yield _entry(name_of, Kind.SCALE, scale, Span(0, 1), EndScale(of=of), scale.dtype)


def _held(revision: AdapterRevision, end: int, vocab: Span) -> Span:
    """Which of the replaced rows lie in the rank's part of the vocabulary."""
    ids = revision.replaced[end].ids
    assert ids is not None
    bounds = torch.searchsorted(ids, torch.tensor([vocab.start, vocab.stop]))
    return Span(int(bounds[0]), int(bounds[1]))


def _entry(
    name: str, kind: Kind, matrix: Tensor, rows: Span, live: Live, dtype: torch.dtype
) -> Entry:
    as_held = matrix.dtype if kind is Kind.REPLACED_IDS else dtype
    return Entry(
        name=name,
        kind=kind,
        layer=TOP,
        shape=(matrix.shape[0], matrix.shape[1]),
        part=WeightSlice(rows=rows, cols=Span(0, matrix.shape[1])),
        live=live,
        whole=lambda span: matrix[span.slice].to(as_held),
        vector=kind is Kind.REPLACED_IDS,
    )
