"""Checks of the GPU: the driver and the architecture, before anything is put on it."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from launch.preflight.errors import PreflightError

OLDEST = (8, 0)
"""Compute capability of the oldest GPUs that run the kernels (Ampere: bfloat16, cp.async)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """What a GPU says of itself."""

    name: str
    uuid: str
    capability: tuple[int, int]
    free_bytes: int
    total_bytes: int


def count_gpus(device: str) -> int:
    """Visible GPUs for ``device`` auto, cpu or cuda; 0 for cpu, or when torch has no CUDA.

    Raises:
        PreflightError: there is a driver too old for this torch, which torch takes for no GPU.
    """
    if device == "cpu" or torch.version.cuda is None:
        return 0
    major, minor = torch.version.cuda.split(".")[:2]
    check_driver(driver_version(), (int(major), int(minor)))
    return torch.cuda.device_count()


def query_gpu(index: int) -> Gpu:
    """Ask the GPU with this local index."""
    facts = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    return Gpu(
        name=facts.name,
        uuid=str(facts.uuid),
        capability=(facts.major, facts.minor),
        free_bytes=free,
        total_bytes=total,
    )


def driver_version() -> tuple[int, int] | None:
    """The newest CUDA (major, minor) that the installed driver serves; None without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int()
    if driver.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return None
    return version.value // 1000, version.value % 1000 // 10


def check_driver(driver: tuple[int, int] | None, runtime: tuple[int, int]) -> None:
    """Check the driver's CUDA version against the one torch was built with.

    A driver serves every minor version of its major one. No driver at all is no fault here.

    Raises:
        PreflightError: the driver's major version is older.
    """
    if driver is not None and driver[0] < runtime[0]:
        raise PreflightError(
            f"the NVIDIA driver serves CUDA up to {driver[0]}.{driver[1]}, but torch was built for "
            f"{runtime[0]}.{runtime[1]}: update the driver, install a torch for CUDA {driver[0]}, "
            f"or use --device cpu"
        )


def check_gpu(gpu: Gpu) -> None:
    """Check the architecture.

    Raises:
        PreflightError: it is older than compute capability 8.0.
    """
    if gpu.capability < OLDEST:
        raise PreflightError(
            f"GPU {gpu.name} has compute capability {gpu.capability[0]}.{gpu.capability[1]}: "
            f"{OLDEST[0]}.{OLDEST[1]} or newer is needed (A100, RTX 30 and later); choose another "
            f"with CUDA_VISIBLE_DEVICES, or use --device cpu"
        )
