"""Sorts the sequences of a step into decode buckets and prefill chunks, on the host."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kernels.attention import AttentionBatch
from kernels.attention.gather import Geometry

_FILL = 0.75  # a bucket holds sequences of at least this share of its longest
_SLACK = 4  # pages of padding that are always cheaper than another bucket


@dataclass(frozen=True, kw_only=True, slots=True)
class Sequence:
    """The part of a sequence that its rows can see, relative to its first visible page."""

    start: int
    """First row of the step."""
    rows: int
    """Number of rows."""
    pages: Tensor
    """int64 [n], the visible pages."""
    low: int
    """First visible token of the first row."""
    high: int
    """End of the context."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Sequences that are gathered together: one prefill chunk, or decode rows alike in length."""

    rows: slice | Tensor
    """Their rows of the step."""
    pages: Tensor
    """int64 [B, n], short ones padded with their own first page."""
    query: int
    """Rows a sequence."""
    low: int
    """First visible token, where all sequences have the same."""
    high: int
    """End of the visible tokens: n * block where they differ."""
    hidden: Tensor | None
    """bool [B, n * block], tokens outside the contexts; None: low and high are the same for all."""
    memo: dict[Geometry, tuple[Tensor, Tensor | None]] = field(default_factory=dict)
    """Places to gather, and places of hidden tokens, by geometry."""

    def places(self, geometry: Geometry) -> tuple[Tensor, Tensor | None]:
        """Return (places of the pages, rows of hidden tokens among the gathered ones)."""
        if geometry not in self.memo:
            hidden = None
            if self.hidden is not None:
                by_head = self.hidden[:, None].expand(-1, geometry.heads, -1)
                hidden = by_head.flatten().nonzero().flatten()
            self.memo[geometry] = (geometry.page_places(self.pages), hidden)
        return self.memo[geometry]

    def bias(self) -> Tensor | None:
        """Return float32 [B, 1, 1, n * block]: -inf where a token is hidden, else 0."""
        if self.hidden is None:
            return None
        zeros = torch.zeros(self.hidden.shape)
        return zeros.masked_fill_(self.hidden, float("-inf"))[:, None, None, :]


def buckets_of(batch: AttentionBatch, block: int, window: int | None, limit: int) -> list[Bucket]:
    """Return the buckets of a step; together they hold every row once.

    Decode buckets gather up to `limit` tokens, or one sequence.
    """
    sequences = list(_sequences(batch, block, window))
    decode = [s for s in sequences if s.rows == 1]
    decode.sort(key=lambda s: (-len(s.pages), s.start))
    found = [_bucket([s], block) for s in sequences if s.rows > 1]
    while decode:
        longest = len(decode[0].pages)
        floor = min(longest * _FILL, longest - _SLACK)
        size = min(sum(len(s.pages) >= floor for s in decode), max(1, limit // (longest * block)))
        members = sorted(decode[:size], key=lambda s: s.start)
        found.append(_bucket(members, block))
        decode = decode[size:]
    return found


def _sequences(batch: AttentionBatch, block: int, window: int | None) -> Iterator[Sequence]:
    bounds: list[int] = batch.query_offsets.tolist()
    table = batch.page_table.long()
    for b, context in enumerate(batch.context_lens.tolist()):
        rows = bounds[b + 1] - bounds[b]
        if rows:
            low = 0 if window is None else max(0, context - rows - window + 1)
            first = low // block
            yield Sequence(
                start=bounds[b],
                rows=rows,
                pages=table[b, first : -(-context // block)],
                low=low - first * block,
                high=context - first * block,
            )


def _bucket(members: list[Sequence], block: int) -> Bucket:
    width = max(len(s.pages) for s in members)
    pages = torch.stack([_padded(s.pages, width) for s in members])
    same = all((s.low, s.high) == (members[0].low, members[0].high) for s in members)
    hidden = None
    if not same:
        token = torch.arange(width * block)
        lows, highs = (torch.tensor([getattr(s, n) for s in members]) for n in ("low", "high"))
        hidden = (token < lows[:, None]) | (token >= highs[:, None])
    return Bucket(
        rows=_rows(members),
        pages=pages,
        query=members[0].rows,
        low=members[0].low if same else 0,
        high=members[0].high if same else width * block,
        hidden=hidden,
    )


def _padded(pages: Tensor, width: int) -> Tensor:
    return torch.cat((pages, pages[:1].expand(width - len(pages))))


def _rows(members: list[Sequence]) -> slice | Tensor:
    """A slice where the rows follow each other (a view, no copy), else an index."""
    start, stop = members[0].start, members[-1].start + members[-1].rows
    if stop - start == sum(s.rows for s in members):
        return slice(start, stop)
    return torch.tensor([s.start for s in members])


__all__ = ["Bucket", "buckets_of"]
