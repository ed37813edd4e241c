"""Builds what a rank serves with: its weights, its arena, its runner; on rank 0 the engine too."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from kernels import Ops, ops_for
from sharding import ModelDims, RankCut, cut_model
from tp_engine.adapters import (
    AdapterRegistry,
    AdapterRevision,
    load_adapters,
    longest_row_bytes,
)
from tp_engine.adapters.ends.base import BaseFiles
from tp_engine.adapters.ends.record import EndSizes
from tp_engine.config import EngineConfig
from tp_engine.engine import Engine
from tp_engine.memory import PageLayout, kv_block_bytes, kv_views
from tp_engine.models import Decoder
from tp_engine.ranks.comm import Comm
from tp_engine.ranks.join import Joined
from tp_engine.requests.admission import EngineLimits
from tp_engine.sampling import Sampler, SlotStates
from tp_engine.steps.runner import Arena, Runner
from tp_engine.steps.worker import Worker
from tp_engine.tiers.fetching import Fetch
from tp_engine.tiers.gains import RankGains
from tp_engine.tiers.host_pages import HostPages
from tp_engine.tiers.room import agree_on_host_pages, agree_on_pages, words_a_page
from tp_engine.weights import RankWeights, load_weights

log = logging.getLogger(__name__)

Phase = Callable[[str], AbstractContextManager[object]]
"""Opens a named start-up phase, which logs its seconds when it closes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rank:
    """One rank, ready for plans."""

    joined: Joined
    dims: ModelDims
    cuts: tuple[RankCut, ...]
    """Of all ranks."""
    weights: RankWeights
    layout: PageLayout
    num_pages: int
    """Equal on all ranks."""
    descriptor_words: int
    base_digest: str
    worker: Worker

    @property
    def config(self) -> EngineConfig:
        """With device, dtype and lengths resolved."""
        return self.joined.config

    @property
    def comm(self) -> Comm:
        """The collectives of this rank."""
        return self.joined.comm

    def unused_page_bytes(self) -> list[int]:
        """By rank, the tail of a KV page that its smaller share of the heads leaves unused."""
        block, dtype = self.layout.block_tokens, self.layout.dtype
        used = [kv_block_bytes(self.dims, cut, dtype, block) for cut in self.cuts]
        return [self.layout.page_bytes - size for size in used]


def build_rank(joined: Joined, phase: Phase = nullcontext) -> Rank:
    """Load this rank's shard and reserve its arena; every rank must call it.

    Raises:
        ValueError: the checkpoint cannot be served, or memory is too small; says what to change.
    """
    config, spec, comm, directory = joined.config, joined.spec, joined.comm, joined.directory
    dims, dtype = spec.dims(), getattr(torch, config.dtype)
    ops = ops_for(comm.device, deterministic=config.deterministic)
    _check_vocabulary(dims.vocab, ops)
    cuts = cut_model(dims, comm.world)
    with phase("load weights"):
        weights = _load(joined, cuts[comm.rank], dtype)
    # Before the arena takes what memory is left.
    states = SlotStates(config.max_num_seqs + 1, cuts[comm.rank].vocab, comm.device)
    layout = PageLayout.choose(dims, cuts, dtype, longest_row_bytes(dims, cuts, dtype))
    with phase("reserve the arena"):
        words_each = words_a_page(dims, layout)
        num_pages = agree_on_pages(config, layout, words_each, comm)
        words = num_pages * words_each
        arena = Arena.allocate(layout, num_pages, words, comm.device)
    with phase("reserve host memory"):
        host = HostPages(
            agree_on_host_pages(config, layout, comm),
            layout.page_bytes,
            pinned=comm.device.type == "cuda",
        )
    gains = RankGains(weights, cuts[comm.rank], dims, ops, comm, dtype)
    return Rank(
        joined=joined,
        dims=dims,
        cuts=cuts,
        weights=weights,
        layout=layout,
        num_pages=num_pages,
        descriptor_words=words,
        base_digest=base_digest(directory),
        worker=Worker(comm, _build_runner(joined, cuts, weights, states, arena), host, gains),
    )


def _check_vocabulary(size: int, ops: Ops) -> None:
    """Refuse a model that could not be sampled from before anything of it is loaded.

    Raises:
        ValueError: its vocabulary is larger than the device's kernels take.
    """
    if ops.most_columns is not None and size > ops.most_columns:
        raise ValueError(
            f"the model's vocab_size={size} is not supported on a GPU, must be at most "
            f"{ops.most_columns}"
        )


def build_engine(rank: Rank, fetch: Fetch) -> Engine:
    """Rank 0's engine over a rank; ``fetch`` reads back adapters that the hosts do not have."""
    config = rank.config
    assert config.max_model_len is not None and config.max_num_batched_tokens is not None
    capacity = rank.num_pages * rank.layout.block_tokens
    limits = EngineLimits(
        vocab_size=rank.dims.vocab,
        max_model_len=min(config.max_model_len, capacity),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        num_pages=rank.num_pages,
        descriptor_words=rank.descriptor_words,
        idle_adapter_pages=int(config.adapter_memory_fraction * rank.num_pages),
        host_pages=rank.worker.host.memory.shape[0],
        adapter_queue=config.adapter_queue,
        prefix_caching=config.enable_prefix_caching,
        eos_ids=rank.joined.spec.eos_token_ids,
        kv_dtype=config.dtype,
        base_digest=rank.base_digest,
    )
    return Engine(
        rank.worker,
        limits,
        fetch=fetch,
        seed=config.seed,
        # A CPU computes while it is asked to: there is nothing to overlap with.
        depth=2 if rank.comm.device.type == "cuda" else 1,
    )


def read_adapters(joined: Joined, take: Callable[[str, AdapterRevision], None]) -> AdapterRegistry:
    """Rank 0: read and verify the adapters that the config names, and give each to ``take``.

    Raises:
        AdapterLoadError: one was refused and ``lora_on_error`` is ``fail``.
    """
    config = joined.config
    registry, reports = load_adapters(
        config.lora,
        config.lora_dir,
        joined.spec,
        config.lora_on_error,
        base_names=config.base_names,
        base_sources=(config.model,),
        base=base_files(joined),
        take=take,
    )
    for report in reports:
        log.log(logging.INFO if report.error is None else logging.ERROR, "%s", report)
        for warning in report.warnings:
            log.warning("adapter %s: %s", report.name, warning)
    return registry


def base_files(joined: Joined) -> BaseFiles:
    """The embedding and the LM head that adapters are read against."""
    return BaseFiles(directory=joined.directory, tied=joined.spec.tie_word_embeddings)


def base_digest(directory: Path) -> str:
    """SHA-256 over the config and the names, sizes and headers of the weight files.

    It tells bases apart within one service; it does not read gigabytes of weights to do so.
    """
    sha = hashlib.sha256((directory / "config.json").read_bytes())
    for path in sorted(directory.glob("*.safetensors")):
        sha.update(f"{path.name} {path.stat().st_size}\n".encode())
        with path.open("rb") as file:
            sha.update(file.read(65536))
    return sha.hexdigest()


def _load(joined: Joined, cut: RankCut, dtype: torch.dtype) -> RankWeights:
    config, device = joined.config, joined.comm.device
    copies = config.keep_dense or device.type != "cpu"
    return load_weights(
        joined.spec,
        joined.directory,
        cut,
        dtype=dtype,
        device=device,
        quantize=config.quantize,
        load_format=config.load_format,
        ops=ops_for(device, deterministic=config.deterministic) if copies else None,
    )


def _build_runner(
    joined: Joined,
    cuts: tuple[RankCut, ...],
    weights: RankWeights,
    states: SlotStates,
    arena: Arena,
) -> Runner:
    config, spec, comm = joined.config, joined.spec, joined.comm
    assert config.max_model_len is not None and config.max_num_batched_tokens is not None
    cut = cuts[comm.rank]
    ops = ops_for(comm.device, deterministic=config.deterministic)
    decoder = Decoder(
        spec,
        cut,
        weights,
        ops,
        comm,
        max_positions=config.max_model_len,
    )
    return Runner(
        decoder=decoder,
        sampler=Sampler(states, [each.vocab for each in cuts], comm, ops),
        arena=arena,
        end_sizes=EndSizes(
            layers=spec.num_layers,
            vocab=cut.vocab.size,
            hidden=spec.hidden_size,
            dtype=arena.layout.dtype,
            page_bytes=arena.layout.page_bytes,
        ),
        kv=kv_views(arena.memory, arena.layout, spec.dims(), cut),
        max_num_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len,
        max_num_batched_tokens=config.max_num_batched_tokens,
        device=comm.device,
        spell_out=ops.spell_out,
        renew=ops.lora_renew,
        capture=ops.capturable and joined.backend == "nccl" and not config.enforce_eager,
    )
