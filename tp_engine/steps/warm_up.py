"""What happens once before the first request, so that no request pays for it.

On a GPU kernels are compiled when they are first launched, each kind for several ranges of rows;
a compilation takes a second, in which no token is made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import msgspec

from tp_engine.engine import Engine
from tp_engine.messages import Submit
from tp_engine.params import SamplingParams

GPU_ROWS = (1, 24, 100, 250, 700, 1100, 1500, 2500)
"""Rows of a step, one for each range that a kernel treats in its own way."""
OUTPUT_TOKENS = 2
_GREEDY = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
_DRAWN = msgspec.structs.replace(_GREEDY, temperature=1.0, top_p=0.9, seed=0)


def warm_up(engine: Engine, *, gpu: bool, max_rank: int = 0) -> None:
    """Let the ranks capture their steps of few rows, and run steps of the base, of one adapter and
    of both together through them, uncounted.

    Args:
        gpu: do it for every range of rows that kernels are compiled for, not just for one row.
        max_rank: LoRA rank of the adapters that may come later.
    """
    engine.capture(max_rank)
    before, scheduled = dict(engine.counters), replace(engine.scheduler.counters)
    adapters = [digest for digest in list(engine.adapters)[:1] if _brought(engine, digest)]
    for count in (*GPU_ROWS, engine.limits.max_num_batched_tokens) if gpu else (1,):
        _run(engine, {"": count})
        for digest in adapters:
            _run(engine, {digest: count})
            if count > 1:  # segments of unequal lengths are looked up, a single one is not
                _run(engine, {"": -(-count // 4), digest: count - -(-count // 4)})
    engine.prefix.clear()
    engine.counters.update(before)
    engine.scheduler.counters = scheduled


def _brought(engine: Engine, digest: str) -> bool:
    """Whether the hosts have an adapter, which is read if need be: its requests could be more than
    may wait for it."""
    adapter = engine.adapters[digest]
    engine.tiers.prefetch(adapter)
    while engine.tiers.busy:
        engine.step()
    return engine.tiers.is_at_hand(adapter.handle)


def _run(engine: Engine, rows: Mapping[str, int]) -> None:
    """A step of so many prompt tokens by revision, and what follows from it."""
    for digest, count in rows.items():
        for message in _prompts(engine, count, digest):
            engine.submit(message, digest)
    while engine.requests:
        engine.step()


def _prompts(engine: Engine, rows: int, digest: str) -> Iterator[Submit]:
    """Requests of so many prompt tokens in all, the first one drawn, the others greedy."""
    tokens = min(OUTPUT_TOKENS, engine.context - 1)
    for number, length in enumerate(split(rows, engine.context - tokens)):
        name = f"warm-up {digest} {rows} {number}"
        params = msgspec.structs.replace(_GREEDY if number else _DRAWN, max_tokens=tokens)
        # A salt of its own: none of it is found in the prefix cache by another.
        yield Submit(request_id=name, model=name, prompt=[0] * length, params=params, salt=name)


def split(rows: int, longest: int) -> Sequence[int]:
    """Lengths of at most ``longest``, as equal as can be, that make ``rows`` together."""
    parts = -(-rows // longest)
    return [rows // parts + (part < rows % parts) for part in range(parts)]
