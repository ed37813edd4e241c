"""Checks of the ranks: torchrun's environment, and that every rank has a GPU of its own."""

from __future__ import annotations

import socket
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass

from launch.preflight.errors import PreflightError

_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankEnvironment:
    """This process's place among the ranks."""

    rank: int
    world: int
    local_rank: int
    """Its number on this host."""
    local_world: int
    """Ranks on this host."""
    torchrun: bool
    """Whether torchrun started it."""


def ensure_torchrun_environment(environ: MutableMapping[str, str]) -> RankEnvironment:
    """Read torchrun's variables, or set those of a world of one rank when there are none.

    Raises:
        PreflightError: only some are set, or their values don't fit together.
    """
    missing = [name for name in _NAMES if name not in environ]
    if len(missing) == len(_NAMES):
        # An address left by something else would be waited for in vain.
        environ["MASTER_ADDR"], environ["MASTER_PORT"] = "127.0.0.1", str(_free_port())
        environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
        return RankEnvironment(rank=0, world=1, local_rank=0, local_world=1, torchrun=False)
    if missing:
        raise PreflightError(
            f"{', '.join(name for name in _NAMES if name in environ)} set, but not "
            f"{', '.join(missing)}: start with torchrun, or unset them for a single rank"
        )
    rank, world, local_rank = (_integer(environ, name) for name in _NAMES)
    local_world = _integer(environ, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in environ else world
    if not (0 <= rank < world and 0 <= local_rank < local_world <= world):
        raise PreflightError(
            f"RANK={rank} of WORLD_SIZE={world}, LOCAL_RANK={local_rank} of "
            f"LOCAL_WORLD_SIZE={local_world} don't fit together: start with torchrun"
        )
    return RankEnvironment(
        rank=rank, world=world, local_rank=local_rank, local_world=local_world, torchrun=True
    )


def _integer(environ: MutableMapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise PreflightError(
            f"{name}={environ[name]!r} is not a whole number: start with torchrun"
        ) from None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def check_distinct_gpus(gpus: Sequence[tuple[str, str]]) -> None:
    """Check that no two ranks share a GPU, which NCCL would answer by hanging or failing late.

    ``gpus`` holds (host, GPU uuid) of every rank in rank order.

    Raises:
        PreflightError: naming two ranks, the host and the GPU.
    """
    owners: dict[tuple[str, str], int] = {}
    for rank, gpu in enumerate(gpus):
        if gpu in owners:
            host, uuid = gpu
            raise PreflightError(
                f"ranks {owners[gpu]} and {rank} both use GPU {uuid} of host {host}: NCCL needs "
                f"one GPU a rank; start fewer ranks, check CUDA_VISIBLE_DEVICES, or share them "
                f"with --backend gloo"
            )
        owners[gpu] = rank
