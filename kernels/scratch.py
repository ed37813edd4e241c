"""Buffers that outlive a call.

A gather of a few MiB, freed at the end of each layer, goes back to the operating system and comes
again page fault by page fault, which takes longer than the gather itself.
"""

import threading

import torch
from torch import Tensor


class Scratch(threading.local):
    """One buffer a (name, dtype) and thread, grown as needed.

    What `take` returns is valid until the next `take` of that name in the same thread: a result
    must never be a view of it.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, name: str, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialised [rows, width]."""
        key, count = (name, dtype), rows * width
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < count:
            with torch.inference_mode(False):  # else it could be written in inference mode alone
                buffer = self._buffers[key] = torch.empty(count, dtype=dtype)
        return buffer[:count].view(rows, width)


SCRATCH = Scratch()

__all__ = ["SCRATCH", "Scratch"]
