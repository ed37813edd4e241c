"""Large blocks of host memory, which a thread frees while no other one runs Python."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sharding import ModelDims, cut_model
from tests.adapters.writing import every_site, random_modules, revision_of
from tp_engine.adapters import pack_adapter
from tp_engine.tiers.host_memory import zeroed_pages

SMAPS = Path("/proc/self/smaps")
needs_huge_pages = pytest.mark.skipif(
    not (SMAPS.is_file() and Path("/sys/kernel/mm/transparent_hugepage").is_dir()),
    reason="this system has no huge pages",
)


def may_be_huge(tensor: Tensor) -> bool:
    """Whether the system was asked for huge pages where a tensor stands."""
    inside = False
    for line in SMAPS.read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            first, end = (int(bound, 16) for bound in bounds.groups())
            inside = first <= tensor.data_ptr() < end
        elif inside and line.startswith("VmFlags:"):
            return "hg" in line.split()
    raise AssertionError("the tensor stands nowhere")


def test_pages_hold_zeros_and_can_be_written() -> None:
    pages = zeroed_pages(3, 4096)
    assert pages.shape == (3, 4096) and pages.dtype == torch.uint8 and not pages.any()
    assert int(pages.fill_(7).sum()) == 7 * pages.numel()
    assert zeroed_pages(0, 4096).shape == (0, 4096)


@needs_huge_pages
def test_images_stand_in_huge_pages() -> None:
    assert not may_be_huge(torch.zeros(4096, dtype=torch.uint8))
    dims = ModelDims(
        layers=1, hidden=24, intermediate=72, heads=3, kv_heads=3, head_dim=8, vocab=64
    )
    revision = revision_of(random_modules(dims, every_site(dims, 2)))
    for image in pack_adapter(revision, cut_model(dims, 2), dims, torch.float32, 4096):
        assert may_be_huge(image.pages), "it would take milliseconds to free it"
