"""Sampling in plain torch: the truth for every other implementation.

Probabilities are turned into whole numbers before they are summed. Sums of whole numbers do not
depend on their order, so a row's token does not depend on device, batch or on how many tokens
without a chance stand in the row.
"""

import torch
from torch import Tensor

from kernels.sampling import MASS_BITS, MAX_RATE, DrawParams, Penalties, keys
from kernels.sampling.checks import (
    check_draw,
    check_logits,
    check_penalise,
    check_rows,
    check_slots,
    check_width,
)


def greedy(logits: Tensor, first_id: int, slots: Tensor, last_token: Tensor) -> Tensor:
    """See `kernels.sampling.Greedy`."""
    check_logits(logits)
    check_slots(logits, slots, last_token)
    best = best_keys(logits, first_id, 1)
    failed = (best[:, 1] != 0) | (keys.values_of(best[:, 0]) == -torch.inf)
    last_token[slots] = keys.ids_of(best[:, 0]).masked_fill(failed, 0)
    return best


def best_keys(logits: Tensor, first_id: int, width: int) -> Tensor:
    """See `kernels.sampling.BestKeys`."""
    check_logits(logits)
    check_width(width)
    columns = logits.shape[1]
    values = logits.float()
    broken = ~(values < torch.inf).all(dim=1, keepdim=True)  # no comparison holds for NaN
    ids = torch.arange(first_id, first_id + columns, device=logits.device)
    best = keys.pack(values, ids).sort(dim=1, descending=True).values[:, :width]
    best = torch.nn.functional.pad(best, (0, width - best.shape[1]), value=keys.PAD)
    return torch.cat([best, broken.to(torch.int64)], dim=1)


def log_total(logits: Tensor, rows: Tensor) -> Tensor:
    """See `kernels.sampling.LogTotal`."""
    check_logits(logits)
    check_rows(rows)
    return logits[rows].to(torch.float64).logsumexp(dim=1)


def penalise(
    logits: Tensor, prompt_seen: Tensor, output_counts: Tensor, penalties: Penalties
) -> None:
    """See `kernels.sampling.Penalise`."""
    check_penalise(logits, prompt_seen, output_counts, penalties)
    repetition, presence, frequency = penalties.factors.unsqueeze(2)  # [n, 1] each
    values = logits[penalties.rows]
    counts = output_counts[penalties.slots]
    seen = prompt_seen[penalties.slots] | (counts > 0)
    repeated = torch.where(values > 0, values / repetition, values * repetition)
    values = torch.where(seen, repeated, values)
    logits[penalties.rows] = values - presence * (counts > 0) - frequency * counts


def draw(logits: Tensor, rows: Tensor, top: Tensor, params: DrawParams) -> Tensor:
    """See `kernels.sampling.Draw`."""
    check_draw(logits, rows, top, params)
    values = logits[rows].float()
    able = top.isfinite()
    values = values.masked_fill(~able[:, None], 0.0)
    top = top.masked_fill(~able, 0.0)
    ranked = (params.top_k > 0) | (params.top_p < 1)
    order = values.sort(dim=1, descending=True, stable=True).indices
    plain = torch.arange(values.shape[1], device=values.device).expand_as(order)
    order = torch.where(ranked[:, None], order, plain)
    column = _draw(values.gather(1, order), top, params, ranked)
    return order.gather(1, column[:, None])[:, 0].masked_fill(~able, 0)


def _draw(values: Tensor, top: Tensor, params: DrawParams, ranked: Tensor) -> Tensor:
    """The place of the drawn value in each row [n, m]; ranked rows (bool [n]) are sorted."""
    mass = _masses(values, top, params, ranked)
    cumulative = mass.cumsum(dim=1)
    total = cumulative[:, -1:]
    # The random number is at most 1 - 2**-53, so the product, rounded, stays below the total.
    target = (params.uniform[:, None] * total.to(torch.float64)).to(torch.int64)
    return torch.searchsorted(cumulative, target, right=True)[:, 0]


def _masses(values: Tensor, top: Tensor, params: DrawParams, ranked: Tensor) -> Tensor:
    """Integer weights int64 [n, m], 0 where a filter drops the token."""
    temperature = torch.where(params.temperature == 0, 1.0, params.temperature)
    # An infinite rate would make no number of the best token's distance of 0.
    rate = 1.0 / temperature.clamp_(min=1.0 / MAX_RATE)
    weight = ((values.to(torch.float64) - top[:, None]) * rate[:, None]).exp_()
    mass = (weight * 2.0**MASS_BITS).round_().to(torch.int64)
    _keep_top(mass, params, ranked)
    # The best token survives top-k and top-p, so min-p's yardstick is its weight: 1.
    return mass.masked_fill_(weight < params.min_p[:, None], 0)


def _keep_top(mass: Tensor, params: DrawParams, ranked: Tensor) -> None:
    """Top-k, then top-p over what it left, in place on int64 [n, m] with descending rows."""
    place = torch.arange(mass.shape[1], device=mass.device)
    top_k = params.top_k[:, None]
    mass.masked_fill_((place >= top_k) & (top_k > 0), 0)
    cumulative = mass.cumsum(dim=1)
    before = (cumulative - mass).to(torch.float64)
    reached = before >= params.top_p[:, None] * cumulative[:, -1:]
    mass.masked_fill_(reached & ranked[:, None], 0)


__all__ = ["best_keys", "draw", "greedy", "log_total", "penalise"]
