"""What the launchers of all families need of shapes and strides."""

from torch import Tensor


def power_of_two(number: int) -> int:
    """The smallest power of two that is not below a number; 1 for none."""
    return 1 << max(0, number - 1).bit_length()


def lined(x: Tensor) -> Tensor:
    """x, or a copy of it, whose last dimension has adjacent elements."""
    return x if x.stride(-1) == 1 else x.contiguous()


__all__ = ["lined", "power_of_two"]
