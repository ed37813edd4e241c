"""Rank 0's part of sampling: from the shards' candidates and whole rows to tokens.

R sampled rows, C candidates a shard and row, F full rows, V tokens of the whole vocabulary,
N alternatives reported at most.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.dispatch import Ops
from kernels.sampling import DrawParams, keys
from tp_engine.sampling.choice import Choice
from tp_engine.sampling.rng import uniform
from tp_engine.sampling.slots import SlotRows
from tp_engine.steps.plan import IntArray
from tp_engine.steps.transfer import to_device

__all__ = ["Whole", "choose"]


Piece = tuple[Tensor, IntArray, IntArray]
"""Logits [n, V], numbers among the R rows, and where these rows are in the logits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Whole:
    """Logits of the whole vocabulary of the full rows."""

    processed: list[Piece]
    """Of all full rows."""
    raw: list[Piece]
    """The model's own, of all full rows."""

    @classmethod
    def joined(
        cls, parts: list[Tensor], shard_sizes: list[int], full_rows: IntArray, raw_rows: IntArray
    ) -> Whole:
        """From `ShardSampler.full` of every rank."""
        sized = zip(parts, shard_sizes, strict=True)
        logits = torch.cat([part[:, :size] for part, size in sized], dim=1)
        places = np.arange(full_rows.size + raw_rows.size)
        same = np.flatnonzero(~np.isin(full_rows, raw_rows))
        return cls(
            processed=[(logits, full_rows, places[: full_rows.size])],
            raw=[
                (logits, full_rows[same], same),
                (logits, raw_rows, places[full_rows.size :]),
            ],
        )


def choose(
    gathered: list[Tensor],
    whole: Whole | None,
    rows: SlotRows,
    full_rows: IntArray,
    ops: Ops,
) -> Choice:
    """Choose a token for every row.

    Args:
        gathered: `ShardSampler.candidates` of every rank, in rank order.
        whole: None without full rows.
        rows: the R rows.
        full_rows: numbers of the F full rows, ascending.
        ops: kernels of the device.
    """
    if rows.greedy():  # the largest key of all shards, and whether one of them is broken
        picked = torch.stack(gathered).amax(dim=0)
        return Choice(picked=picked, logprobs=None, alternatives=None)
    reported = rows.reported().size > 0
    packed = torch.stack(gathered, dim=1)  # [R, ranks, C + 1 or C + 2]
    width = packed.shape[2] - (2 if reported else 1)
    merged = packed[:, 0, :width]
    if len(gathered) > 1:
        every = packed[:, :, :width].flatten(1)
        merged = every.sort(dim=1, descending=True).values[:, :width]
    broken = packed[:, :, width].any(dim=1)
    tops = keys.values_of(merged[:, 0])
    failed = broken | (tops == -torch.inf)
    tops = tops.masked_fill(failed, torch.nan)
    tokens = _tokens(merged, tops, whole, rows, full_rows, ops).masked_fill(failed, 0)
    picked = torch.stack([keys.of_ids(tokens), failed.to(torch.int64)], dim=1)
    if not reported:
        return Choice(picked=picked, logprobs=None, alternatives=None)
    total = packed[:, :, -1].view(torch.float64).logsumexp(dim=1)  # [R]
    logits, alternatives = _reported(merged, tokens, whole, rows, full_rows, ops)
    logprobs = logits.to(torch.float64) - total[:, None]
    return Choice(picked=picked, logprobs=logprobs, alternatives=alternatives)


def _tokens(
    merged: Tensor,
    tops: Tensor,
    whole: Whole | None,
    rows: SlotRows,
    full_rows: IntArray,
    ops: Ops,
) -> Tensor:
    """int64 [R] from keys int64 [R, C], the best logits (NaN: failed) and whole rows."""
    ids = keys.ids_of(merged)
    tokens = ids[:, 0].clone()
    drawn = rows.params["temperature"] > 0
    partial = drawn.copy()
    partial[full_rows] = False
    if (some := np.flatnonzero(partial)).size:
        top_k = rows.params["top_k"][some]
        assert (top_k >= 1).all() and (top_k <= ids.shape[1]).all(), "too few candidates"
        index, params = _draw_params(rows, some, some, merged.device)
        column = ops.draw(keys.values_of(merged), index[0], tops[index[0]], params)
        tokens[index[0]] = ids[index[0], column]
    for logits, numbers, places in whole.processed if whole is not None else ():
        mine = np.flatnonzero(drawn[numbers])
        if mine.size:
            index, params = _draw_params(rows, numbers[mine], places[mine], merged.device)
            tokens[index[0]] = ops.draw(logits, index[1], tops[index[0]], params)
    return tokens


def _draw_params(
    rows: SlotRows, some: IntArray, places: IntArray, device: torch.device
) -> tuple[Tensor, DrawParams]:
    """int64 [2, n] of ``some`` and ``places``, and the parameters of ``some``, in one copy."""
    params = rows.params[some]
    seeds, positions = params["seed"].copy(), rows.positions[some]
    numbers = uniform(torch.from_numpy(seeds), torch.from_numpy(positions)).numpy()
    real = np.stack([params["temperature"], params["top_p"], params["min_p"], numbers])
    words = np.concatenate([real.view(np.int64), np.stack([params["top_k"], some, places])])
    sent = to_device(words, device)
    temperature, top_p, min_p, drawn = sent[:4].view(torch.float64)
    return sent[5:], DrawParams(
        temperature=temperature, top_k=sent[4], top_p=top_p, min_p=min_p, uniform=drawn
    )


def _reported(
    merged: Tensor,
    tokens: Tensor,
    whole: Whole | None,
    rows: SlotRows,
    full_rows: IntArray,
    ops: Ops,
) -> tuple[Tensor, Tensor]:
    """Raw logits float32 [R, 1 + N] of chosen tokens and alternatives, and the latter's ids."""
    count = int(rows.params["logprobs"].max())
    assert count <= merged.shape[1], "fewer candidates than alternatives to report"
    top = merged[:, :count]
    match = keys.ids_of(merged) == tokens[:, None]
    found = keys.values_of(merged).masked_fill(~match, -torch.inf).amax(dim=1)
    changed = rows.raw_rows(full_rows)
    for logits, numbers, places in whole.raw if whole is not None else ():
        index = to_device(np.stack([numbers, places]), tokens.device)
        found[index[0]] = logits[index[1], tokens[index[0]]].to(torch.float32)
        own = np.flatnonzero(np.isin(numbers, changed))
        if count and own.size:
            index = to_device(np.stack([numbers[own], places[own]]), tokens.device)
            best = ops.best_keys(logits[index[1]], 0, count)[:, :count]
            top = top.index_copy(0, index[0], best)
    return torch.cat([found[:, None], keys.values_of(top)], dim=1), keys.ids_of(top)
