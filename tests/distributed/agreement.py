"""Greedy tokens against an oracle's logits: equal, except at near-ties.

The oracle is run once over prompt and output together. If every token is the oracle's best one
after all tokens before it, then by induction the output is the one that greedy decoding with the
oracle gives. At a near-tie, where the two best logits differ by less than `NEAR_TIE` of the row's
range, rounding decides; there either of the contenders is accepted, and since the oracle sees the
tokens that were really generated, the comparison goes on past it. At most `NEAR_TIE_SHARE` of
all positions may be near-ties, else the comparison would say too little.

Legend: T output tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

NEAR_TIE = 1e-4
NEAR_TIE_SHARE = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """One output compared."""

    positions: int
    near_ties: int
    wrong: list[str]
    """Each wrong token in words."""


def compare(tokens: Sequence[int], logits: Tensor) -> Agreement:
    """Compare an output with the oracle's logits [T, V], row t being what chooses token t."""
    assert logits.shape[0] == len(tokens), f"{len(tokens)} tokens, {logits.shape[0]} rows"
    near_ties, wrong = 0, []
    spread = logits.amax(1) - logits.amin(1)
    best = logits.topk(2, dim=1)
    for at, token in enumerate(tokens):
        first, second = best.values[at].tolist()
        limit = NEAR_TIE * float(spread[at])
        tied = first - second < limit
        near_ties += tied
        behind = first - float(logits[at, token])
        if token != best.indices[at, 0] and not (tied and behind < limit):
            wrong.append(
                f"token {at} is {token}, whose logit is {behind:.4g} below that of "
                f"{int(best.indices[at, 0])}; a near-tie would be below {limit:.4g}"
            )
    return Agreement(positions=len(tokens), near_ties=near_ties, wrong=wrong)


def assert_agreement(compared: Iterable[tuple[str, Agreement]]) -> None:
    """All outputs of a case, by a name for each: no wrong token, and few enough near-ties."""
    items = list(compared)
    wrong = [f"{name}: {item.wrong[0]}" for name, item in items if item.wrong]
    assert not wrong, "\n".join(wrong)
    positions = sum(item.positions for _, item in items)
    near_ties = sum(item.near_ties for _, item in items)
    assert positions > 0
    assert near_ties <= NEAR_TIE_SHARE * positions, f"{near_ties} near-ties in {positions} tokens"
