"""The engine. What is where, each line in reading order:

    begins       config, hub, join, rank, weights, room, host_memory, warm_up; llm for offline use
    decides      service, engine, admission, seeds, books, scheduler, memory, roster    (rank 0)
    tells        plan, channel, comm, symmetric, worker, outputs, stats
    computes     runner, host_step, step, step_shape, graphs, transfer, models, layers, sampling
    adapters     adapters: from files to page images; sources: from elsewhere to files
                 tiers, fetching, background, delivery, gains, host_pages, copies, resident_ends,
                 shortage: up to where they are used; fleet: names that come, change and go
    front end    messages, link, params, text, completion
    processes    liveness, logs, interpreter

Importing it is cheap; the names below are loaded on first use, so that reading options does not
import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tp_engine.completion import Completion
    from tp_engine.config import EngineConfig
    from tp_engine.llm import LLM
    from tp_engine.params import SamplingParams

__all__ = ["LLM", "Completion", "EngineConfig", "SamplingParams"]

_HOMES = {
    "Completion": "tp_engine.completion",
    "EngineConfig": "tp_engine.config",
    "LLM": "tp_engine.llm",
    "SamplingParams": "tp_engine.params",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
