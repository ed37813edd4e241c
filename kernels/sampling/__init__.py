"""From logits to tokens: the best candidates of a row, and the draw of one token.

Legend: R rows, V columns of logits (tokens of a vocabulary shard), n drawn rows, C candidates.
A candidate is a key (`kernels.sampling.keys`): one integer that orders by logit, then by lowest id.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class Greedy(Protocol):
    """The best token of every row."""

    def __call__(self, logits: Tensor, first_id: int, slots: Tensor, last_token: Tensor) -> Tensor:
        """Find each row's best token and note it in the row's slot.

        Semantics: result = best_keys(logits, first_id, 1); last_token[slots[r]] = the id of row
        r's key, or 0 when the row is broken or has only minus infinities.

        logits floating point [R, V]; slots int64 [R]; last_token int64 [S], written; rows of one
        slot leave the token of any of them. Returns int64 [R, 2]. R and V may be 0. Raises
        ValueError, naming the argument, on a wrong shape or dtype.
        """
        ...


class BestKeys(Protocol):
    """The best candidates of every row."""

    def __call__(self, logits: Tensor, first_id: int, width: int) -> Tensor:
        """Pack the best ``width`` tokens of each row.

        Semantics: column c is token first_id + c; keys are sorted by logit in float32, highest
        first, equal ones by id. A row is broken when it holds NaN or plus infinity.

        logits floating point [R, V]; 1 <= width <= 128. Returns int64 [R, width + 1]: the keys,
        filled up with `keys.PAD`, then whether the row is broken (1) or not (0); keys of a broken
        row are not fixed. R and V may be 0. Raises ValueError as `Greedy`.
        """
        ...


class LogTotal(Protocol):
    """The normaliser of log-probabilities."""

    def __call__(self, logits: Tensor, rows: Tensor) -> Tensor:
        """log(sum(exp(logits[rows]))) in float64; minus infinity where no logit is finite.

        logits floating point [R, V], V may be 0; rows int64 [n]; returns float64 [n], of rows that
        are not broken. Raises ValueError as `Greedy`.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Penalties:
    """What n rows are penalised for, and how much."""

    rows: Tensor
    """int64 [n], numbers of the rows, none twice."""
    slots: Tensor
    """int64 [n], where their counts are."""
    factors: Tensor
    """float32 [3, n]: of repetition, presence and frequency."""


class Penalise(Protocol):
    """Penalties for what a sequence holds already."""

    def __call__(
        self, logits: Tensor, prompt_seen: Tensor, output_counts: Tensor, penalties: Penalties
    ) -> None:
        """Change rows in place.

        Semantics, of a row's logit l of a token that stands c times in the output: where c > 0 or
        the token is in the prompt, l = l / repetition if l > 0 else l * repetition; then l =
        l - presence * (c > 0) - frequency * c, rounded after each operation.

        logits float32 [R, V]; prompt_seen bool and output_counts int32 [S, V], by slot. Raises
        ValueError as `Greedy`.
        """
        ...


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

    def take(self, rows: Tensor) -> "DrawParams":
        """The parameters of some rows (int64 [k])."""
        return DrawParams(
            temperature=self.temperature[rows],
            top_k=self.top_k[rows],
            top_p=self.top_p[rows],
            min_p=self.min_p[rows],
            uniform=self.uniform[rows],
        )


class Draw(Protocol):
    """A random choice by probability."""

    def __call__(self, logits: Tensor, rows: Tensor, top: Tensor, params: DrawParams) -> Tensor:
        """Draw a column of each of n rows: the distribution function's inverse.

        Semantics, of row l = logits[rows[i]] and rate = min(1 / temperature, `MAX_RATE`): weights
        exp((l - top) * rate) in float64, times 2**`MASS_BITS`, rounded; columns ordered by logit
        (highest first, then by column) when top-k or top-p is asked for, else by column. Top-k
        keeps the first k, then top-p those before which less than top_p of what is left stands,
        then min-p those of a weight of min_p or more. The drawn column is the first whose running
        sum exceeds uniform times the sum of all. Sums of whole numbers do not depend on their
        order: neither does the choice.

        logits floating point [R, V]; rows int64 [n]; top float32 [n], the largest of each row.
        Returns int64 [n]; 0 where top is not finite. Raises ValueError as `Greedy`.
        """
        ...


MASS_BITS = 38
"""The best token's weight is 2**38: tokens 2**39 times less likely are never drawn, and the sum
over 2**24 tokens stays below 2**63."""

MAX_RATE = 1e300
"""The largest inverse of a temperature."""

__all__ = [
    "MASS_BITS",
    "MAX_RATE",
    "BestKeys",
    "Draw",
    "DrawParams",
    "Greedy",
    "LogTotal",
    "Penalise",
    "Penalties",
]
