"""What the launchers of all families need of shapes, strides and the device."""

from functools import cache

import torch
from torch import Tensor

HOPPER_ROOM = 227 << 10
"""Bytes of shared memory that a program may have on Hopper."""


@cache
def shared_room(device: torch.device) -> int:
    """Bytes of shared memory that a program may have: 99 KiB on GPUs other than those of data
    centres. Of kernels that are interpreted, what Hopper has."""
    if device.type != "cuda":
        return HOPPER_ROOM
    properties = torch.cuda.get_device_properties(device)
    room: int = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]  # of torch
    return room


def power_of_two(number: int) -> int:
    """The smallest power of two that is not below a number; 1 for none."""
    return 1 << max(0, number - 1).bit_length()


def lined(x: Tensor) -> Tensor:
    """x, or a copy of it, whose last dimension has adjacent elements."""
    return x if x.stride(-1) == 1 else x.contiguous()


__all__ = ["HOPPER_ROOM", "lined", "power_of_two", "shared_room"]
