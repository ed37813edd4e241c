"""The words of a descriptor record for the two ends, and matrices found through them.

Legend: V local vocabulary rows, H hidden size, r LoRA rank, n replaced rows of the rank, S sites.

Behind the last layer's words a record's head has those of `sharding.TOP`, two a slot of S. The
end's number e is added to the slots below; the other ones are 0:

    slot 0 + e   (first << 16) | r, scale    offsets of the chunks of ``tokens``, then ``hidden``
    slot 2 + e   (first << 16), V            of the chunks of ``whole``
    slot 4 + e   (first << 16), n            of the chunks of ``rows``, then ``ids``

``first`` counts words from the record's beginning; 0: there is no such thing. How many chunks there
are follows from the shapes (see `tp_engine.adapters.ends.layout`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from sharding import SITES, VOCAB_SITES
from tp_engine.adapters.ends.layout import MatrixKey, chunk_rows
from tp_engine.adapters.layout import EndRole
from tp_engine.adapters.record import RANK_BITS

_SLOTS: Final[tuple[tuple[EndRole, ...], ...]] = (("tokens", "hidden"), ("whole",), ("rows", "ids"))
"""Which matrices stand in the slots 2 * i + end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EndSizes:
    """What a record leaves unsaid, equal for all adapters of a rank."""

    layers: int
    vocab: int
    """V."""
    hidden: int
    """H."""
    dtype: torch.dtype
    """Of all matrices but the ids."""
    page_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MatrixPlace:
    """Where a matrix stands."""

    offsets: Tensor
    """int64 [chunks], bytes."""
    rows: int
    columns: int
    chunk_rows: int
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class EndPlaces:
    """What a record says of one end."""

    matrices: Mapping[EndRole, MatrixPlace]
    scale: float
    """0 without LoRA."""


def end_words(
    layers: int,
    offsets: Mapping[MatrixKey, Tensor],
    heads: Mapping[MatrixKey, tuple[int, int]],
    first: int,
) -> tuple[dict[int, int], Tensor]:
    """The words of a record: those of its head by their index, and what is added at its end.

    Args:
        layers: of the model.
        offsets: int64 of the chunks of each matrix.
        heads: by the first matrix of a slot, r (or 0) and the second word.
        first: words that the record has as yet.
    """
    head: dict[int, int] = {}
    parts: list[Tensor] = [torch.empty(0, dtype=torch.int64)]
    for slot, roles in enumerate(_SLOTS):
        for end in range(len(VOCAB_SITES)):
            if (end, roles[0]) not in heads:
                continue
            at = 2 * (layers * len(SITES) + len(VOCAB_SITES) * slot + end)
            rank, head[at + 1] = heads[end, roles[0]]
            head[at] = (first << RANK_BITS) | rank
            parts += [offsets[end, role] for role in roles]
            first += sum(offsets[end, role].numel() for role in roles)
    return head, torch.cat(parts)


def end_places(words: Tensor, sizes: EndSizes) -> dict[int, EndPlaces]:
    """What a record says of the ends, by end; nothing of an end that the adapter leaves alone.

    Args:
        words: int64, on the host; with offsets into an image or, relocated, into the arena.
    """
    found = {}
    for end in range(len(VOCAB_SITES)):
        matrices: dict[EndRole, MatrixPlace] = {}
        scale = 0.0
        for slot, roles in enumerate(_SLOTS):
            at = 2 * (sizes.layers * len(SITES) + len(VOCAB_SITES) * slot + end)
            head = int(words[at])
            if head == 0:
                continue
            rank, count = head & ((1 << RANK_BITS) - 1), int(words[at + 1])
            if slot == 0:
                scale = float(words[at + 1 : at + 2].view(torch.float64))
            matrices |= _places(words, head >> RANK_BITS, roles, rank, count, sizes)
        if matrices:
            found[end] = EndPlaces(matrices=matrices, scale=scale)
    return found


def _places(
    words: Tensor, first: int, roles: Sequence[EndRole], rank: int, count: int, sizes: EndSizes
) -> dict[EndRole, MatrixPlace]:
    """The matrices of one slot."""
    shapes: dict[EndRole, tuple[int, int]] = {
        "tokens": (sizes.vocab, rank),
        "hidden": (rank, sizes.hidden),
        "whole": (sizes.vocab, sizes.hidden),
        "rows": (count, sizes.hidden),
        "ids": (count, 1),
    }
    found: dict[EndRole, MatrixPlace] = {}
    for role in roles:
        rows, columns = shapes[role]
        dtype = torch.int64 if role == "ids" else sizes.dtype
        size = chunk_rows(rows, columns * dtype.itemsize, sizes.page_bytes)
        chunks = -(-rows // size)
        found[role] = MatrixPlace(
            offsets=words[first : first + chunks],
            rows=rows,
            columns=columns,
            chunk_rows=size,
            dtype=dtype,
        )
        first += chunks
    return found
