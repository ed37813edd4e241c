"""Rank 0's part of sampling: from the shards' candidates and whole rows to tokens.

R sampled rows, C candidates a shard and row, F full rows, V tokens of the whole vocabulary,
N alternatives reported at most.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tp_engine.messages import TokenLogprobs
from tp_engine.plan import IntArray
from tp_engine.sampling import keys
from tp_engine.sampling.draw import DrawParams, draw
from tp_engine.sampling.rng import uniform
from tp_engine.sampling.slots import SlotRows
from tp_engine.transfer import to_device

__all__ = ["Choice", "choose"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """What was chosen."""

    tokens: Tensor
    """int64 [R]; 0 where ``failed``."""
    failed: Tensor
    """bool [R]: the row's logits hold NaN or plus infinity, or leave no token to choose."""
    logprobs: Tensor | None
    """float64 [R, 1 + N]: of the chosen token, then of the alternatives; None: nobody asked."""
    alternatives: Tensor | None
    """int64 [R, N]: ids, best first."""

    def to_host(self) -> Choice:
        """A copy on the host; on a GPU only begun, so wait for the stream before reading it."""
        return Choice(
            tokens=_to_host(self.tokens),
            failed=_to_host(self.failed),
            logprobs=None if self.logprobs is None else _to_host(self.logprobs),
            alternatives=None if self.alternatives is None else _to_host(self.alternatives),
        )

    def report(self, rows: SlotRows) -> list[TokenLogprobs | None]:
        """Per row what its request asked for."""
        reports: list[TokenLogprobs | None] = [None] * self.tokens.shape[0]
        if self.logprobs is None or self.alternatives is None:
            return reports
        tokens, failed = self.tokens.tolist(), self.failed.tolist()
        logprobs, ids = self.logprobs.tolist(), self.alternatives.tolist()
        for row in rows.reported().tolist():
            if failed[row]:
                continue
            chosen, *others = logprobs[row]
            wanted = int(rows.params["logprobs"][row])
            # Minus infinity: the vocabulary has fewer possible tokens than were asked for.
            others = [value for value in others[:wanted] if value > -torch.inf]
            reports[row] = TokenLogprobs(tokens[row], chosen, ids[row][: len(others)], others)
        return reports


@dataclass(frozen=True, kw_only=True, slots=True)
class _Whole:
    """Whole rows, put together."""

    index: Tensor
    """int64 [F]: their numbers among the R rows."""
    ranked: IntArray
    """Those of the F rows that top-k or top-p needs sorted, on the host."""
    plain: IntArray
    """The other ones."""
    processed: Tensor
    """float32 [F, V]."""
    raw: Tensor
    """float32 [n, V]: the model's logits of ``raw_index``."""
    raw_index: Tensor
    """int64 [n]: numbers among the R rows; equal ``processed`` in the other full rows."""
    raw_place: Tensor
    """int64 [n]: the same, among the F rows."""


def choose(
    gathered: list[Tensor],
    whole: list[Tensor] | None,
    rows: SlotRows,
    full_rows: IntArray,
    shard_sizes: list[int],
) -> Choice:
    """Choose a token for every row.

    Args:
        gathered: `ShardSampler.candidates` of every rank, in rank order.
        whole: `ShardSampler.full` of every rank; None without full rows.
        rows: the R rows.
        full_rows: numbers of the F full rows, ascending.
        shard_sizes: tokens of every rank's shard, in rank order.
    """
    packed = torch.stack(gathered, dim=1)  # [R, ranks, C + 2]
    width = packed.shape[2] - 2
    merged = packed[:, :, :width].flatten(1).sort(dim=1, descending=True).values[:, :width]
    failed = packed[:, :, -1].any(dim=1) | (keys.values_of(merged[:, 0]) == -torch.inf)
    parts = None if whole is None else _assemble(whole, rows, full_rows, shard_sizes)
    tokens = _tokens(merged, failed, parts, rows, full_rows)
    if rows.reported().size == 0:
        return Choice(tokens=tokens, failed=failed, logprobs=None, alternatives=None)
    total = packed[:, :, -2].view(torch.float64).logsumexp(dim=1)  # [R]
    logits, alternatives = _reported(merged, tokens, parts, rows)
    logprobs = logits.to(torch.float64) - total[:, None]
    return Choice(tokens=tokens, failed=failed, logprobs=logprobs, alternatives=alternatives)


def _assemble(
    whole: list[Tensor], rows: SlotRows, full_rows: IntArray, shard_sizes: list[int]
) -> _Whole:
    parts = [part[:, :size] for part, size in zip(whole, shard_sizes, strict=True)]
    logits = torch.cat(parts, dim=1)
    raw_rows, params = rows.raw_rows(full_rows), rows.params[full_rows]
    drawn = params["temperature"] > 0
    sort = (params["top_k"] > 0) | (params["top_p"] < 1)

    return _Whole(
        index=to_device(full_rows, logits.device),
        ranked=np.flatnonzero(drawn & sort),
        plain=np.flatnonzero(drawn & ~sort),
        processed=logits[: full_rows.size],
        raw=logits[full_rows.size :],
        raw_index=to_device(raw_rows, logits.device),
        raw_place=to_device(np.searchsorted(full_rows, raw_rows), logits.device),
    )


def _tokens(
    merged: Tensor, failed: Tensor, whole: _Whole | None, rows: SlotRows, full_rows: IntArray
) -> Tensor:
    """int64 [R] from keys int64 [R, C] and whole rows."""
    ids = keys.ids_of(merged)
    tokens = ids[:, 0]
    drawn = rows.params["temperature"] > 0
    if drawn.any():
        params = _draw_params(rows, merged.device)
        partial = drawn.copy()
        partial[full_rows] = False
        if partial.any():
            top_k = rows.params["top_k"][partial]
            assert (top_k >= 1).all() and (top_k <= ids.shape[1]).all(), "too few candidates"
            values = keys.values_of(merged).masked_fill(failed[:, None], 0.0)
            column = draw(values, params, ranked=True)
            picked = ids.gather(1, column[:, None])[:, 0]
            tokens = torch.where(to_device(partial, ids.device), picked, tokens)
        if whole is not None:
            tokens = _draw_whole(tokens, failed, whole, params)
    return tokens.masked_fill(failed, 0).contiguous()


def _draw_params(rows: SlotRows, device: torch.device) -> DrawParams:
    seeds = torch.from_numpy(rows.params["seed"].copy())
    numbers = uniform(seeds, torch.from_numpy(rows.positions.copy()))
    return DrawParams(
        temperature=to_device(rows.params["temperature"], device),
        top_k=to_device(rows.params["top_k"], device),
        top_p=to_device(rows.params["top_p"], device),
        min_p=to_device(rows.params["min_p"], device),
        uniform=to_device(numbers.numpy(), device),
    )


def _draw_whole(tokens: Tensor, failed: Tensor, whole: _Whole, params: DrawParams) -> Tensor:
    """``tokens`` [R] with those of the drawn whole rows replaced."""
    tokens = tokens.clone()
    for places, ranked in ((whole.ranked, True), (whole.plain, False)):
        if places.size == 0:
            continue
        place = to_device(places, tokens.device)
        index = whole.index[place]
        values = whole.processed[place].masked_fill(failed[index, None], 0.0)
        if ranked:
            values, ids = values.sort(dim=1, descending=True, stable=True)
            column = draw(values, params.take(index), ranked=True)
            tokens[index] = ids.gather(1, column[:, None])[:, 0]
        else:
            tokens[index] = draw(values, params.take(index), ranked=False)
    return tokens


def _reported(
    merged: Tensor, tokens: Tensor, whole: _Whole | None, rows: SlotRows
) -> tuple[Tensor, Tensor]:
    """Raw logits float32 [R, 1 + N] of chosen tokens and alternatives, and the latter's ids."""
    count = int(rows.params["logprobs"].max())
    assert count <= merged.shape[1], "fewer candidates than alternatives to report"
    top = merged[:, :count]
    match = keys.ids_of(merged) == tokens[:, None]
    found = keys.values_of(merged).masked_fill(~match, -torch.inf).amax(dim=1)
    if whole is not None:
        raw = whole.processed.index_copy(0, whole.raw_place, whole.raw)
        found = found.index_copy(0, whole.index, raw.gather(1, tokens[whole.index, None])[:, 0])
        top = top.index_copy(0, whole.raw_index, keys.best(whole.raw, 0, count))
    return torch.cat([found[:, None], keys.values_of(top)], dim=1), keys.ids_of(top)


def _to_host(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
