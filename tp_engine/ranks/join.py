"""How a process becomes a rank: device, process groups, the base's directory, agreed config."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from tp_engine.config import ConfigError, EngineConfig
from tp_engine.hub import download_model, local_model
from tp_engine.models import ModelSpec
from tp_engine.ranks.comm import Comm
from tp_engine.ranks.symmetric import share_mailboxes


@dataclass(frozen=True, kw_only=True, slots=True)
class Joined:
    """A rank that knows its peers and its model, before any weight is read."""

    config: EngineConfig
    """With device, dtype and lengths resolved."""
    directory: Path
    spec: ModelSpec
    comm: Comm
    backend: str
    """Of the device group: nccl or gloo."""


def join(config: EngineConfig) -> Joined:
    """Meet the other ranks and agree on the model; every rank must call it.

    A hub id is downloaded by the first rank of each host; the others read it from the cache.

    Raises:
        ValueError: the device, the model or an option cannot be used; says why.
    """
    comm, backend = connect(config)
    first_of_host = os.environ.get("LOCAL_RANK", "0") == "0"
    directory = download_model(config) if first_of_host else None
    comm.gather_numbers([1])
    directory = directory or local_model(config)
    spec = ModelSpec.from_directory(directory)
    resolved = config.resolve(
        cuda=comm.device.type == "cuda", model_positions=spec.max_position_embeddings
    )
    if comm.world > 1 and backend == "nccl":
        dtype = getattr(torch, resolved.dtype)
        comm = share_mailboxes(comm, row_bytes=spec.hidden_size * dtype.itemsize)
    return Joined(config=resolved, directory=directory, spec=spec, comm=comm, backend=backend)


def connect(config: EngineConfig) -> tuple[Comm, str]:
    """Meet the other ranks, on this rank's device; also the device group's backend."""
    cuda = torch.cuda.is_available() and config.device != "cpu"
    device = _device(cuda)
    torch.set_num_threads(config.cpu_threads)
    backend = _backend(config, cuda)
    comm = Comm.connect(
        device,
        backend=backend,
        timeout=config.rank_timeout,
        deterministic=config.deterministic,
    )
    return comm, backend


def _device(cuda: bool) -> torch.device:
    if not cuda:
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def _backend(config: EngineConfig, cuda: bool) -> str:
    """nccl on GPUs, unless gloo is asked for; nccl refuses two ranks on one GPU.

    Raises:
        ConfigError: nccl, and more ranks than GPUs on this host.
    """
    if not cuda or config.backend == "gloo":
        return "gloo"
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if local > torch.cuda.device_count():
        raise ConfigError(
            "backend",
            config.backend,
            f"gloo when {local} ranks share {torch.cuda.device_count()} GPUs of a host",
        )
    return "nccl"
