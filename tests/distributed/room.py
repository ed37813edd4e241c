"""How many arena pages a case needs."""

from __future__ import annotations

from pathlib import Path

import torch

from sharding import cut_model
from tests.distributed.workload import Case
from tp_engine.adapters import longest_row_bytes, pages_needed, read_adapter
from tp_engine.memory import PageLayout
from tp_engine.models import ModelSpec


def choose_pages(case: Case, world: int) -> tuple[int, int]:
    """The number of pages that the case's room comes to, and what all would need at once."""
    assert case.room is not None
    spec = ModelSpec.from_directory(Path(case.model))
    dims = spec.dims()
    cuts = cut_model(dims, world)
    dtype = torch.float32
    layout = PageLayout.choose(dims, cuts, dtype, longest_row_bytes(dims, cuts, dtype))
    adapters = [
        pages_needed(read_adapter(Path(path), spec), cuts, dims, dtype, layout.page_bytes)
        for path in case.adapters.values()
    ]
    sequences = [
        layout.blocks(len(ask.prompt) + (ask.params.max_tokens or 0)) for ask in case.rounds[0]
    ]
    at_once = sum(adapters) + sum(sequences)
    room = case.room
    if room.share is not None:
        return int(at_once * room.share), at_once
    return room.adapters * max(adapters) + room.sequences * max(sequences), at_once
