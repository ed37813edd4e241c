"""Ranks agree on how much they have."""

from __future__ import annotations

import pytest
import torch

from tp_engine.config import EngineConfig
from tp_engine.memory import PageLayout
from tp_engine.ranks.comm import Comm
from tp_engine.tiers.room import agree_on_pages

LAYOUT = PageLayout(block_tokens=16, page_bytes=1024, dtype=torch.bfloat16)


@pytest.mark.parametrize("words", [0, 16])
@pytest.mark.parametrize(
    ("local", "gpus", "ranks", "sharing"),
    [(1, 1, (0,), 1), (2, 2, (0, 1), 1), (2, 1, (0, 1), 2), (3, 2, (0, 2), 2), (3, 2, (1,), 1)],
)
def test_ranks_that_share_a_gpu_share_what_is_free(
    monkeypatch: pytest.MonkeyPatch,
    local: int,
    gpus: int,
    ranks: tuple[int, ...],
    sharing: int,
    words: int,
) -> None:
    """For pages, and for the words that come with each."""
    free, total = 900 * 1024, 1000 * 1024
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, total))
    config = EngineConfig(model="m", gpu_memory_utilization=0.75)
    for rank in ranks:
        comm = Comm.alone(torch.device("cuda", rank % gpus))
        pages = agree_on_pages(config, LAYOUT, words, comm)
        assert pages == (900 - 250) * 1024 // sharing // (1024 + 8 * words)
