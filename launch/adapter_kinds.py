"""Kinds of adapters, as a profile for the capacity planner lists them, and what one takes."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from sharding import SITES, TOP, VOCAB_SITES, RankCut, Span, cut_model
from tp_engine.adapters import LoraModule
from tp_engine.adapters.ends.layout import end_groups, end_matrices
from tp_engine.adapters.ends.replaced import EMBEDDING, Replaced
from tp_engine.adapters.layout import ModuleRows, groups_of, place_rows
from tp_engine.adapters.targets import Place
from tp_engine.memory import PageLayout
from tp_engine.models import ModelSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterKind:
    """One line of a profile."""

    rank: int
    """LoRA rank of every module."""
    count: int
    """How many there are; also how likely one is among those in use."""
    targets: tuple[str, ...] = SITES
    """Modules, such as ``q_proj``, in every layer; also ``embed_tokens`` and ``lm_head``."""
    dora: bool = False
    """Whether every module has a gain (``use_dora``)."""
    bias: bool = False
    """Whether every module has a bias of B (``lora_bias``)."""
    saved: tuple[str, ...] = ()
    """Of ``embed_tokens`` and ``lm_head`` those that are replaced whole (``modules_to_save``)."""
    tokens: int = 0
    """Tokens whose rows of ``embed_tokens``, and of a head that is tied to it, are replaced
    (``trainable_token_indices``); counted as if all were one rank's."""

    def __post_init__(self) -> None:
        for name in ("rank", "count"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name}={value!r} must be a whole number from 1 on")
        for name in ("dora", "bias"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ValueError(f"{name}={value!r} must be true or false")
        if type(self.tokens) is not int or self.tokens < 0:
            raise ValueError(f"tokens={self.tokens!r} must be a whole number from 0 on")
        self._check_names("targets", (*SITES, *VOCAB_SITES))
        self._check_names("saved", VOCAB_SITES)
        both = {*self.targets} & {*self.saved}
        if not self.targets or both:
            reason = f"must be some, and none of saved={list(self.saved)}"
            raise ValueError(f"targets={list(self.targets)} {reason}")

    def _check_names(self, name: str, allowed: tuple[str, ...]) -> None:
        value = getattr(self, name)
        if not {*value} <= {*allowed}:
            raise ValueError(f"{name}={list(value)} must be some of {', '.join(allowed)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class KindNeed:
    """What an adapter of a kind takes on each rank, in the arena."""

    kind: AdapterKind
    row_bytes: int
    """Of its rank-rows on the rank that has the most."""
    whole_bytes: int
    """Of its tensors before they are cut, in the type that is served."""
    pages: int
    allocated: int
    """Bytes of those pages."""


def read_profile(path: Path) -> tuple[AdapterKind, ...]:
    """Read ``[{"rank": 16, "count": 200, "targets": ["q_proj", ...], "dora": true}, ...]``.

    Raises:
        ValueError: it cannot be read, or a field is missing, unknown or out of range.
    """
    try:
        lines = json.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"profile {path}: {error}") from None
    if not isinstance(lines, list):
        raise ValueError(f"profile {path}: must be a list of objects")
    kinds = []
    for number, line in enumerate(lines, 1):
        try:
            kinds.append(_kind(line))
        except ValueError as error:
            raise ValueError(f"profile {path}, entry {number}: {error}") from None
    return tuple(kinds)


def _kind(line: object) -> AdapterKind:
    if not isinstance(line, dict):
        raise ValueError(f"{line!r} must be an object")
    fields, needed = {field.name for field in dataclasses.fields(AdapterKind)}, {"rank", "count"}
    if not needed <= line.keys():
        raise ValueError(f"{line} must have rank and count")
    if unknown := sorted(line.keys() - fields):
        more = ", ".join(sorted(fields - needed))
        raise ValueError(
            f"no kind has {', '.join(unknown)}: beside rank and count it may have {more}"
        )
    names = {name: _names(name, line[name]) for name in ("targets", "saved") if name in line}
    return AdapterKind(**{**line, **names})


def _names(field: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise ValueError(f"{field}={value!r} must be a list of names")
    return tuple(value)


def kind_need(
    kind: AdapterKind, spec: ModelSpec, cuts: Sequence[RankCut], layout: PageLayout
) -> KindNeed:
    """What an adapter of a kind takes, by the functions that place a real one."""
    dims = spec.dims()
    modules = {
        (layer, SITES.index(site)): ModuleRows(kind.rank, gain=kind.dora, bias=kind.bias)
        for layer in range(dims.layers)
        for site in kind.targets
        if site in SITES
    }
    groups = []
    for cut in (*cuts, *cut_model(dims, 1)):
        ends = end_matrices(*_ends(kind, spec, cut.vocab), cut.vocab)
        of_ends = end_groups(ends, layout.dtype, layout.page_bytes)
        groups.append([*groups_of(modules, cut, dims, layout.dtype), *of_ends])
    *row_bytes, whole = (sum(group.rows * group.row_bytes for group in each) for each in groups)
    pages = max(place_rows(each, layout.page_bytes)[1] for each in groups[:-1])
    return KindNeed(
        kind=kind,
        row_bytes=max(row_bytes),
        whole_bytes=whole,
        pages=pages,
        allocated=pages * layout.page_bytes,
    )


def _ends(
    kind: AdapterKind, spec: ModelSpec, vocab: Span
) -> tuple[dict[Place, LoraModule], dict[int, Replaced]]:
    """The kind's changes of the embedding and the LM head, as shapes without numbers.

    Args:
        vocab: of the rank that all replaced rows are to lie on.
    """
    shape = functools.partial(torch.empty, device="meta")
    height, width, rank = spec.vocab_size, spec.hidden_size, kind.rank
    modules: dict[Place, LoraModule] = {}
    replaced: dict[int, Replaced] = {}
    for end, name in enumerate(VOCAB_SITES):
        if name in kind.targets:
            rows, columns = (width, height) if end == EMBEDDING else (height, width)
            pair = LoraModule(a=shape(rank, columns), b=shape(rows, rank), scale=1.0)
            modules[TOP, end] = pair
        ids = None
        if kind.tokens and (end == EMBEDDING or spec.tie_word_embeddings):
            ids = torch.arange(vocab.start, min(vocab.start + kind.tokens, vocab.stop))
        whole = shape(height, width) if name in kind.saved else None
        rows_of = None if ids is None else shape(len(ids), width)
        if whole is not None or ids is not None:
            replaced[end] = Replaced(whole=whole, ids=ids, rows=rows_of)
    return modules, replaced
