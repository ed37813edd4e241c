"""Loads a rank as the server does, with an arena just large enough for the check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from launch.validation.batch import Batch
from sharding import cut_model
from tp_engine.adapters import AdapterRevision, longest_row_bytes, pages_needed
from tp_engine.engine import Engine
from tp_engine.fleet import AdapterLoader
from tp_engine.memory import PageLayout
from tp_engine.messages import Failed, Submit
from tp_engine.params import SamplingParams
from tp_engine.rank import Rank, build_engine, build_rank
from tp_engine.ranks.comm import Comm
from tp_engine.ranks.join import Joined
from tp_engine.steps.plan import PlanKind

SPARE_PAGES = 2


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Loaded:
    """A rank with its adapters in the arena, after one run of the batch."""

    rank: Rank
    descriptors: Mapping[str, int]
    """By revision digest, where the adapter's record begins."""
    tokens: list[list[int]]
    """Of each sequence of the batch, what the engine generated."""


def load(joined: Joined, adapters: Mapping[str, AdapterRevision], batch: Batch) -> Loaded:
    """Load, hand out the adapters, and generate the batch, which publishes them in the arena.

    Every rank of ``joined`` must call it.

    Raises:
        ValueError: the model or an adapter cannot be loaded.
        RuntimeError: a sequence failed, or an adapter is not resident after the run.
    """
    pages = _pages(joined, adapters, batch)
    config = replace(joined.config, num_pages=pages)
    rank = build_rank(replace(joined, config=config))
    engine = None
    rank.comm.gather_numbers([1])
    if rank.comm.rank == 0:
        loader = AdapterLoader(rank, None)
        engine = build_engine(rank, loader.fetch)
        for name, revision in adapters.items():
            loader.keep_source(revision)
            engine.roster.register(name, revision, loader.pack(revision))
        tokens = _generate(engine, batch)
        engine.control(PlanKind.RETURN)
    else:
        tokens = []
        rank.worker.follow(lambda: None)
    return Loaded(
        rank=rank,
        descriptors=_descriptors(rank.comm, engine, adapters),
        tokens=_share_tokens(rank.comm, tokens, batch),
    )


def _pages(joined: Joined, adapters: Mapping[str, AdapterRevision], batch: Batch) -> int:
    """Arena pages for all adapters and all sequences at once."""
    dims, dtype = joined.spec.dims(), getattr(torch, joined.config.dtype)
    cuts = cut_model(dims, joined.comm.world)
    layout = PageLayout.choose(dims, cuts, dtype, longest_row_bytes(dims, cuts, dtype))
    pages = SPARE_PAGES + sum(layout.blocks(length) for length in batch.lengths)
    for revision in adapters.values():
        pages += pages_needed(revision, cuts, dims, dtype, layout.page_bytes)
    return pages


def _generate(engine: Engine, batch: Batch) -> list[list[int]]:
    """Greedy tokens of each sequence, all in one batch."""
    params = SamplingParams(max_tokens=batch.new_tokens, temperature=0.0, ignore_eos=True)
    for i, (prompt, digest) in enumerate(zip(batch.prompts, batch.digests, strict=True)):
        request = Submit(request_id=str(i), model=batch.names[i], prompt=prompt, params=params)
        engine.submit(request, digest)
    tokens: list[list[int]] = [[] for _ in batch.prompts]
    while engine.requests:
        for output in engine.step():
            if isinstance(output, Failed):
                raise RuntimeError(output.message)
            tokens[int(output.request_id)] += output.tokens
    return tokens


def _descriptors(
    comm: Comm, engine: Engine | None, adapters: Mapping[str, AdapterRevision]
) -> dict[str, int]:
    """Where rank 0 has put the adapters' records, on all ranks."""
    if not adapters:
        return {}
    numbers = [-1] * len(adapters)
    digests = [revision.digest for revision in adapters.values()]
    if engine is not None:
        resident = {r.footprint.digest: r.descriptor for r in engine.residency.residents}
        numbers = [resident.get(digest, -1) for digest in digests]
    numbers = comm.gather_numbers(numbers)[0]
    for name, number in zip(adapters, numbers, strict=True):
        if number < 0:
            raise RuntimeError(f"adapter {name} is not in the arena after its request")
    return dict(zip(digests, numbers, strict=True))


def _share_tokens(comm: Comm, tokens: list[list[int]], batch: Batch) -> list[list[int]]:
    """Rank 0's tokens on all ranks."""
    count = batch.new_tokens
    flat = [token for each in tokens for token in each] or [0] * count * len(batch.prompts)
    flat = comm.gather_numbers(flat)[0]
    return [flat[i : i + count] for i in range(0, len(flat), count)]
