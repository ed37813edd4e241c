"""Back from shards to the whole, element by element, to prove that nothing was changed."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from kernels.nf4 import NF4Weight
from sharding.units import Span

__all__ = ["ExpandedNF4", "assemble", "expand"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ExpandedNF4:
    """An NF4 weight [N, K] with nothing packed and nothing shared."""

    codes: torch.Tensor
    """Code of each element, uint8 [N, K], 0 to 15."""
    absmax: torch.Tensor
    """Scale of each element's block, float32 [N, K]."""

    def equal(self, other: "ExpandedNF4") -> bool:
        """Equality of every code and of every bit of every scale."""
        return torch.equal(self.codes, other.codes) and torch.equal(
            self.absmax.view(torch.int32), other.absmax.view(torch.int32)
        )


def expand(weight: NF4Weight) -> ExpandedNF4:
    """Unpack a shard (or a whole weight)."""
    pairs = torch.stack((weight.codes >> 4, weight.codes & 15), dim=-1).flatten(1)
    element = torch.arange(weight.columns) + weight.phase[:, None].long()  # [N, K]
    return ExpandedNF4(
        codes=pairs[:, : weight.columns].contiguous(),
        absmax=weight.absmax.gather(1, element // weight.blocksize),
    )


def assemble(shape: tuple[int, int], parts: Iterable[tuple[NF4Weight, Span, Span]]) -> ExpandedNF4:
    """Put shards, each with its rows and columns, together to a whole of the given shape.

    Parts may overlap (replicated KV heads), but must then agree bit for bit.

    Raises:
        ValueError: naming the first place where a part does not fit its spans, parts disagree, or
            an element is in no part.
    """
    whole = ExpandedNF4(
        codes=torch.zeros(shape, dtype=torch.uint8), absmax=torch.zeros(shape, dtype=torch.float32)
    )
    covered = torch.zeros(shape, dtype=torch.bool)
    for weight, rows, cols in parts:
        if weight.shape != (rows.size, cols.size) or (rows.stop > shape[0] or cols.stop > shape[1]):
            raise ValueError(f"shard {weight.shape} does not fit rows {rows}, cols {cols}")
        at, part = (rows.slice, cols.slice), expand(weight)
        differs = (whole.codes[at] != part.codes) | (
            whole.absmax.view(torch.int32)[at] != part.absmax.view(torch.int32)
        )
        _refuse(differs & covered[at], rows.start, cols.start, "is not the same in two shards")
        whole.codes[at], whole.absmax[at], covered[at] = part.codes, part.absmax, True
    _refuse(~covered, 0, 0, "is in no shard")
    return whole


def _refuse(bad: torch.Tensor, row: int, col: int, why: str) -> None:
    """Raise for the first true element of ``bad``, whose corner is at (row, col)."""
    found = bad.nonzero()
    if found.numel():
        i, j = found[0].tolist()
        raise ValueError(f"element [{row + i}, {col + j}] {why}")
