"""Triton kernels run as NumPy on CPU tensors.

Triton reads TRITON_INTERPRET when a kernel is defined, so these files are collected only in a
process that was started with it; `tests/kernels/test_beside.py` starts one for each file.
"""

import os
from collections.abc import Iterator

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob = [] if INTERPRETED else ["test_*.py"]


@pytest.fixture(autouse=True)
def _poisoned_outputs() -> Iterator[None]:
    """Every `torch.empty` is full of NaN (or the largest integers): what is read was written."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(before)
