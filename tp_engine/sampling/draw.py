"""Drawing one token a row from logits, filtered by top-k, top-p and min-p.

n rows, m tokens each. Probabilities are turned into whole numbers before they are summed. Sums of
whole numbers do not depend on their order, so a row's token does not depend on device, batch or
on how many tokens without a chance stand in the row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["DrawParams", "draw"]

MASS_BITS = 38
"""The best token's weight is 2**38: tokens 2**39 times less likely are never drawn, and the sum
over 2**24 tokens stays below 2**63."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawParams:
    """Parameters of n rows, each a tensor [n] on the logits' device."""

    temperature: Tensor
    """float64; 0 is treated as 1, for rows whose draw is not used."""
    top_k: Tensor
    """int64; 0 keeps all."""
    top_p: Tensor
    """float64."""
    min_p: Tensor
    """float64."""
    uniform: Tensor
    """float64 in [0, 1): the row's random number."""

    def take(self, rows: Tensor) -> DrawParams:
        """The parameters of some rows (int64 [k])."""
        return DrawParams(
            temperature=self.temperature[rows],
            top_k=self.top_k[rows],
            top_p=self.top_p[rows],
            min_p=self.min_p[rows],
            uniform=self.uniform[rows],
        )


def draw(values: Tensor, params: DrawParams, *, ranked: bool) -> Tensor:
    """Choose a column of each row by its probability: the distribution function's inverse.

    Args:
        values: float32 [n, m] logits; every row has a finite one, minus infinity is never drawn.
        params: of the n rows.
        ranked: whether rows are sorted, best first; top-k and top-p are applied only then.

    Returns:
        int64 [n].
    """
    mass = _masses(values, params, ranked=ranked)
    cumulative = mass.cumsum(dim=1)
    total = cumulative[:, -1:]
    # The random number is at most 1 - 2**-53, so the product, rounded, stays below the total.
    target = (params.uniform[:, None] * total.to(torch.float64)).to(torch.int64)
    return torch.searchsorted(cumulative, target, right=True)[:, 0]


def _masses(values: Tensor, params: DrawParams, *, ranked: bool) -> Tensor:
    """Integer weights int64 [n, m], 0 where a filter drops the token."""
    temperature = torch.where(params.temperature == 0, 1.0, params.temperature)
    exact = values.to(torch.float64)
    top = exact[:, :1] if ranked else exact.amax(dim=1, keepdim=True)
    weight = ((exact - top) / temperature[:, None]).exp_()
    mass = (weight * 2.0**MASS_BITS).round_().to(torch.int64)
    if ranked:
        _keep_top(mass, params)
    # The best token survives top-k and top-p, so min-p's yardstick is its weight: 1.
    return mass.masked_fill_(weight < params.min_p[:, None], 0)


def _keep_top(mass: Tensor, params: DrawParams) -> None:
    """Top-k, then top-p over what it left, in place on int64 [n, m] with descending rows."""
    place = torch.arange(mass.shape[1], device=mass.device)
    top_k = params.top_k[:, None]
    mass.masked_fill_((place >= top_k) & (top_k > 0), 0)
    cumulative = mass.cumsum(dim=1)
    before = (cumulative - mass).to(torch.float64)
    mass.masked_fill_(before >= params.top_p[:, None] * cumulative[:, -1:], 0)
