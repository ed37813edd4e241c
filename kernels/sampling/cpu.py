"""Sampling on CPU: the reference's result without sorting what needs no order."""

import torch
from torch import Tensor

from kernels.sampling import DrawParams, keys, reference
from kernels.sampling.checks import check_draw, check_logits, check_slots, check_width


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
    values = logits.float()
    broken = ~(values < torch.inf).all(dim=1, keepdim=True)  # no comparison holds for NaN
    return torch.cat([keys.best(values, first_id, width), broken.to(torch.int64)], dim=1)


log_total = reference.log_total
penalise = reference.penalise


def draw(logits: Tensor, rows: Tensor, top: Tensor, params: DrawParams) -> Tensor:
    """See `kernels.sampling.Draw`."""
    check_draw(logits, rows, top, params)
    ranked = (params.top_k > 0) | (params.top_p < 1)
    tokens = torch.empty_like(rows)
    for places in (ranked.nonzero()[:, 0], (~ranked).nonzero()[:, 0]):
        if places.numel():
            some = params.take(places)
            tokens[places] = reference.draw(logits, rows[places], top[places], some)
    return tokens


__all__ = ["best_keys", "draw", "greedy", "log_total", "penalise"]
