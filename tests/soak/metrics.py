"""``/metrics`` as numbers."""

from __future__ import annotations

import re

from tests.soak.http import Target, opened

RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
KNOWN, RESIDENT = "tp_engine:adapters", "tp_engine:adapters_resident"
_SAMPLE = re.compile(r"^([a-z_]+:[a-z_0-9]+) (\S+)$", re.MULTILINE)
_RESIDENT = re.compile(r'running_lora_adapters="([^"]*)"')
_KNOWN = re.compile(r'max_lora="(\d+)"')


async def read_metrics(target: Target) -> dict[str, float]:
    """All plain metrics, and how many revisions the engine knows and has in the arena."""
    async with opened(target, "GET", "/metrics") as response:
        await response.begin()
        text = (await response.body()).decode()
    found = {name: float(value) for name, value in _SAMPLE.findall(text)}
    known, resident = _KNOWN.search(text), _RESIDENT.search(text)
    found[KNOWN] = float(known[1]) if known else 0.0
    found[RESIDENT] = float(len(resident[1].split(","))) if resident and resident[1] else 0.0
    return found
