"""How many pages and words a rank has for KV blocks and adapters; the ranks agree on the least."""

from __future__ import annotations

import os

import torch

from sharding import SITES, ModelDims
from tp_engine.config import EngineConfig, default_cpu_arena, default_host_memory
from tp_engine.memory import PageLayout
from tp_engine.ranks.comm import Comm
from tp_engine.tiers.host_memory import free_host_bytes


def agree_on_pages(config: EngineConfig, layout: PageLayout, words: int, comm: Comm) -> int:
    """The page count that every rank can hold.

    Args:
        words: descriptor words a page, which a GPU holds beside the arena.

    Raises:
        ValueError: not even one sequence of one block beside its adapter's page fits.
    """
    wanted = config.num_pages or _pages(config, layout, words, comm)
    pages = min(numbers[0] for numbers in comm.gather_numbers([wanted]))
    if pages < 2:
        raise ValueError(
            f"num_pages={pages} is not allowed: at least 2 pages of {layout.page_bytes} bytes are "
            "needed; raise arena_bytes or gpu_memory_utilization, or use more ranks"
        )
    return pages


def _pages(config: EngineConfig, layout: PageLayout, words: int, comm: Comm) -> int:
    if config.arena_bytes is not None:
        return config.arena_bytes // layout.page_bytes
    if comm.device.type == "cpu":
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return default_cpu_arena(free_host_bytes(), local) // layout.page_bytes
    free, total = torch.cuda.mem_get_info(comm.device)
    left = int(free - (1 - config.gpu_memory_utilization) * total)
    each = max(0, left) // ranks_on_gpu(comm.device)
    return each // (layout.page_bytes + words * torch.int64.itemsize)


def ranks_on_gpu(device: torch.device) -> int:
    """Ranks of this host that compute on a GPU; more than one only over gloo."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, len(range(device.index, local, torch.cuda.device_count())))


def agree_on_host_pages(config: EngineConfig, layout: PageLayout, comm: Comm) -> int:
    """The pages that every rank's host has for adapters."""
    wanted = config.adapter_host_memory
    if wanted is None:
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        wanted = default_host_memory(free_host_bytes(), local)
    return min(numbers[0] for numbers in comm.gather_numbers([wanted // layout.page_bytes]))


def words_a_page(dims: ModelDims, layout: PageLayout) -> int:
    """Descriptor words for every page, so that there are enough for the records of as many
    rank-rows of the mean length as the arena can hold.

    A record has at most four words for every site of a layer and one a rank-row; an adapter takes
    one page or more.
    """
    attention = (dims.heads + dims.kv_heads) * dims.head_dim
    width = 3 * dims.hidden + 2 * attention + dims.intermediate * 3 + 4 * dims.hidden
    mean_row = width * layout.dtype.itemsize // (2 * len(SITES))
    head = 4 * (dims.layers + 1) * len(SITES)
    return head + layout.page_bytes // mean_row + 1
