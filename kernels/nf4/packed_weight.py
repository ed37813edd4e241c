"""The type of a packed NF4 shard; `packed.py` makes one and says what is where."""

from dataclasses import dataclass

from torch import Tensor

BLOCK = 64
"""Columns that share an absmax in a packed shard."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedNF4:
    """A packed shard; P = padded N, B = padded K / 64."""

    words: Tensor
    """int32 [P / 16, B * 128], the tiles of 16 rows, block after block."""
    scales: Tensor
    """int32 [B / 2, P], bfloat16 bits of the absmax, the even block's in the low half. Row 8 r + g
    of 16 stands at 2 g + r, so that a lane finds its two side by side."""
    rest: Tensor
    """int32 [B / 2, P], float32 bits minus those of `scales`, signed, packed the same way."""
    rows: int
    """N."""
    columns: int
    """K."""

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return (self.rows, self.columns)

    @property
    def blocks(self) -> int:
        """B."""
        return self.words.shape[1] // (2 * BLOCK)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.words.nbytes + self.scales.nbytes + self.rest.nbytes

    @property
    def out_features(self) -> int:
        """N."""
        return self.rows

    @property
    def in_features(self) -> int:
        """K."""
        return self.columns


__all__ = ["BLOCK", "PackedNF4"]
