"""Kernels that begin while the one before them ends: programmatic dependent launch.

Such a kernel is launched with ``launch_pdl`` and waits (`gdc_wait`) before it touches anything that
a kernel before it reads or writes. Until then it may read what no kernel of a step writes: weights
and tables.
"""

from functools import cache

import torch


def overlaps(device: torch.device) -> bool:
    """Say whether kernels on the device can be launched that way: from Hopper on."""
    return device.type == "cuda" and _capability(device) >= 9


@cache
def _capability(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0]


__all__ = ["overlaps"]
