"""From a configuration to a loaded rank, with every check before any weight is read."""

from __future__ import annotations

import logging
import os
import socket
import zlib

import torch

from launch.preflight import (
    Gpu,
    check_distinct_gpus,
    check_gpu,
    check_memory,
    count_gpus,
    estimate_memory,
    free_host_bytes,
    query_gpu,
)
from tp_engine.config import EngineConfig
from tp_engine.logs import Phases
from tp_engine.rank import Rank, build_rank
from tp_engine.ranks.join import Joined, join
from tp_engine.tiers.room import ranks_on_gpu

log = logging.getLogger(__name__)


def start_rank(config: EngineConfig, phases: Phases) -> Rank:
    """Join the other ranks, check this one's device and memory, and load its shard.

    Raises:
        ValueError: something does not fit; says what, and what to do.
    """
    count_gpus(config.device)  # a driver that is too old would pass for no GPU at all
    with phases.phase("join the other ranks"):
        joined = join(config)
    _check_device(joined)
    return build_rank(joined, phases.phase)


def _check_device(joined: Joined) -> None:
    gpu = None
    if joined.comm.device.type == "cuda":
        gpu = query_gpu(joined.comm.device.index)
        check_gpu(gpu)
        if joined.backend == "nccl":
            _check_distinct(joined, gpu)
    _check_memory(joined, gpu)
    joined.comm.gather_numbers([1])  # nobody loads while another still measures


def _check_distinct(joined: Joined, gpu: Gpu) -> None:
    # Names travel as checksums: equal ones are what matters.
    mine = [zlib.crc32(socket.gethostname().encode()), zlib.crc32(gpu.uuid.encode())]
    everyone = joined.comm.gather_numbers(mine)
    check_distinct_gpus([(f"{host:08x}", f"{uuid:08x}") for host, uuid in everyone])


def _check_memory(joined: Joined, gpu: Gpu | None) -> None:
    config, spec = joined.config, joined.spec
    assert config.max_model_len is not None and config.max_num_batched_tokens is not None
    nf4 = config.quantize is not None or spec.quantization is not None
    need = estimate_memory(
        spec.dims(),
        joined.comm.world,
        element_bytes=getattr(torch, config.dtype).itemsize,
        nf4=nf4,
        dense_copies=config.keep_dense and gpu is None,
        tied=spec.tie_word_embeddings,
        max_model_len=config.max_model_len,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
    )
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if gpu is None:
        available, where = free_host_bytes() // local, f"this host, for each of {local} ranks"
    else:
        sharing = ranks_on_gpu(joined.comm.device)
        left = int(gpu.free_bytes - (1 - config.gpu_memory_utilization) * gpu.total_bytes)
        available = left // sharing
        where = f"GPU {joined.comm.device.index} ({gpu.name}), for each of {sharing} ranks"
    check_memory(need, available, arena_bytes=config.arena_bytes, where=where, nf4=nf4)
