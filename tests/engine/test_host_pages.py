"""Page images on a host, and their way into an arena, byte by byte."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import cast
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tp_engine.tiers.copies
from tp_engine.adapters import AdapterImage, head_words
from tp_engine.ranks.comm import Comm
from tp_engine.tiers.copies import Copies
from tp_engine.tiers.host_pages import HostPages, runs
from tp_engine.tiers.resident_ends import ResidentEnds

LAYERS = 1
PAGE_BYTES = 64
pages_of = st.lists(st.integers(0, 11), min_size=1, max_size=8, unique=True)


@given(pages_of, st.randoms(use_true_random=False))
def test_runs_are_the_longest_stretches_in_which_all_columns_count_up(pages, random) -> None:
    other = sorted(pages) if random.random() < 0.5 else random.sample(pages, len(pages))
    found = runs(pages, other)
    assert [i for start, stop in found for i in range(start, stop)] == list(range(len(pages)))
    for start, stop in found:
        for i in range(start + 1, stop):
            assert (pages[i], other[i]) == (pages[i - 1] + 1, other[i - 1] + 1)
    for start, _ in found[1:]:
        assert (pages[start], other[start]) != (pages[start - 1] + 1, other[start - 1] + 1)


@settings(max_examples=25, deadline=None)
@given(pages_of, pages_of, st.sampled_from([24, 64, 100, 2**20]), st.integers(0, 2**31))
def test_an_adapter_arrives_in_whatever_pages_it_is_given(
    host_pages, arena_pages, part_bytes, seed
) -> None:
    with patch.object(tp_engine.tiers.copies, "PART_BYTES", part_bytes):
        check_arrival(host_pages, arena_pages, part_bytes, seed)


def check_arrival(
    host_pages: list[int], arena_pages: list[int], part_bytes: int, seed: int
) -> None:
    count = min(len(host_pages), len(arena_pages))
    host_pages, arena_pages = host_pages[:count], arena_pages[:count]
    random = torch.Generator().manual_seed(seed)
    pages = torch.randint(0, 256, (count, PAGE_BYTES), dtype=torch.uint8, generator=random)
    offsets = 16 * torch.randint(0, count * PAGE_BYTES // 16, (6,), generator=random)
    record = torch.cat([torch.zeros(head_words(LAYERS), dtype=torch.int64), offsets])
    host = HostPages(12, PAGE_BYTES, pinned=False)
    host.store(5, host_pages, AdapterImage(pages=pages.clone(), record=record))
    assert torch.equal(host.memory[host_pages], pages)
    arena = torch.full((12 * PAGE_BYTES,), 255, dtype=torch.uint8)
    before = arena.clone()
    descriptors = torch.zeros(200, dtype=torch.int64)
    ends = cast(ResidentEnds, SimpleNamespace(publish=lambda *of: None))
    alone = Comm.alone(torch.device("cpu"))
    copies = Copies(alone, host, arena, descriptors, LAYERS, ends)
    parts = copies._parts(host_pages, arena_pages)
    assert max(source.numel() for source, _ in parts) <= part_bytes, "a step would wait behind it"
    copies.begin(5, 30, arena_pages)
    deadline = time.monotonic() + 10
    while not (landed := copies.landed()):
        assert time.monotonic() < deadline
        time.sleep(0.0005)
    assert landed == [(5, None)]
    assert torch.equal(arena.view(12, PAGE_BYTES)[arena_pages], pages)
    others = [page for page in range(12) if page not in arena_pages]
    assert torch.equal(arena.view(12, PAGE_BYTES)[others], before.view(12, PAGE_BYTES)[others])
    placed = descriptors[30 + head_words(LAYERS) :][:6]
    for there, here in zip(placed.tolist(), offsets.tolist(), strict=True):
        assert torch.equal(arena[there : there + 16], pages.view(-1)[here : here + 16])
    host.drop(5)
    with pytest.raises(KeyError):
        host.copy_of(5)


def test_a_host_without_the_memory_names_the_option() -> None:
    with pytest.raises(ValueError, match="lower --adapter-host-memory"):
        HostPages(2**40, 2**20, pinned=False)


def test_a_copy_that_fails_is_told_to_who_waits() -> None:
    host = HostPages(2, PAGE_BYTES, pinned=False)
    arena = torch.zeros(2 * PAGE_BYTES, dtype=torch.uint8)
    ends = cast(ResidentEnds, SimpleNamespace(publish=lambda *of: None))
    alone = Comm.alone(torch.device("cpu"))
    copies = Copies(alone, host, arena, torch.zeros(9, dtype=torch.int64), LAYERS, ends)
    copies.begin(1, 0, [0])  # nobody has stored it
    deadline = time.monotonic() + 10
    with pytest.raises(RuntimeError, match="COPIES") as error:
        while time.monotonic() < deadline:
            copies.landed()
    assert isinstance(error.value.__cause__, KeyError)
