"""The engine. What is where, each line in reading order:

    begins       config, hub, rank; llm for offline use
    decides      service, engine, requests, books, scheduler, memory, roster, stats    (rank 0)
    tells        steps: plans and who follows them; ranks: processes that act as one
    computes     steps: what a plan becomes; weights, models, layers, sampling
    adapters     adapters: from files to page images; sources: from elsewhere to files; tiers,
                 shortage: up to where they are used; fleet: names that come, change and go
    front end    messages, link, params, text
    processes    logs, interpreter

Importing it is cheap; the names below are loaded on first use, so that reading options does not
import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tp_engine.config import EngineConfig
    from tp_engine.llm import LLM
    from tp_engine.params import SamplingParams
    from tp_engine.requests.completion import Completion

__all__ = ["LLM", "Completion", "EngineConfig", "SamplingParams"]

_HOMES = {
    "Completion": "tp_engine.requests.completion",
    "EngineConfig": "tp_engine.config",
    "LLM": "tp_engine.llm",
    "SamplingParams": "tp_engine.params",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
