"""Deltas that the reader of a projection adds to it."""

from torch import Tensor

from kernels.checks import check_delta


def with_delta(x: Tensor, delta: Tensor | None) -> Tensor:
    """Return x + delta, rounded once to their dtype; x itself if there is none.

    Raises ValueError where their shapes or dtypes differ.
    """
    if delta is None:
        return x
    check_delta(x, delta)
    return x + delta


__all__ = ["with_delta"]
