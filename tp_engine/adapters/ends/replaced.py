"""What an adapter puts in the place of the base's own numbers at the model's two ends.

Legend: V vocabulary, H hidden size, n replaced rows. An *end* is the embedding or the LM head, by
its number in `sharding.VOCAB_SITES`; either one is a matrix with a row a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from torch import Tensor

EMBEDDING: Final = 0
HEAD: Final = 1


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Replaced:
    """A whole matrix, then single rows of it. LoRA on the same end comes on top of them."""

    whole: Tensor | None = None
    """[V, H], float32, bfloat16 or float16; None: the base's."""
    ids: Tensor | None = None
    """int64 [n], ascending: tokens whose rows are replaced."""
    rows: Tensor | None = None
    """[n, H], likewise, beside ``ids``."""

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Those that there are, by their role."""
        named = {"whole": self.whole, "ids": self.ids, "rows": self.rows}
        return {role: tensor for role, tensor in named.items() if tensor is not None}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())
