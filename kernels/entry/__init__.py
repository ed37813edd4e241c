"""How a step begins: what its rows are made of, and the tokens' embeddings.

Legend: T rows of a step, B sequences, S slots, V vocabulary rows of this rank, H hidden size.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepRows:
    """The rows of a step, spelled out."""

    tokens: Tensor
    """int64 [T]."""
    write_pages: Tensor
    """int32 [T], the page that takes the keys and values of each row."""
    write_slots: Tensor
    """int32 [T], the place in that page."""
    page_table: Tensor
    """int32 [B, blocks], pages of each sequence in order."""


class SpellOut(Protocol):
    """The first op of a step."""

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        row_slots: Tensor,
        slots: Tensor,
        last_token: Tensor,
        tables: Tensor,
        *,
        block_tokens: int,
        blocks: int,
    ) -> StepRows:
        """Look up what the slots hold for the rows and sequences of a step.

        Semantics: tokens[t] where it is not negative, else last_token[row_slots[t]]; write_pages =
        tables[row_slots, positions // block_tokens]; write_slots = positions % block_tokens;
        page_table = tables[slots, :blocks].

        tokens, positions and row_slots int64 [T]; slots int64 [B]; last_token int64 [S]; tables
        int32 [S, at least blocks]; all tensors of the result are new. Raises ValueError, naming
        the argument, on a wrong shape or dtype.
        """
        ...


class Embed(Protocol):
    """The lookup of embeddings in a rank's rows of the vocabulary."""

    def __call__(self, tokens: Tensor, weight: Tensor, first_id: int) -> Tensor:
        """Rows of the tokens that this rank has; zeros for the others.

        Semantics: weight[tokens[t] - first_id] where that is a row of weight, else 0.

        tokens int64 [T]; weight [V, H], V may be 0; returns a new [T, H] in weight's dtype. Raises
        ValueError, naming the argument, on a wrong shape or dtype.
        """
        ...


__all__ = ["Embed", "SpellOut", "StepRows"]
