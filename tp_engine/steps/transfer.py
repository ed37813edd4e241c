"""Small host arrays on their way to the device."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def to_device(array: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """A copy of a host array, which may be read-only.

    On a GPU the copy is only begun, from pinned memory: a copy that waits would wait for all that
    was launched before it.
    """
    host = torch.from_numpy(array.copy())
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)
