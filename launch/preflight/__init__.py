"""Checks before any weight is read: each failure says what is wrong and what to do."""

from launch.preflight.errors import PreflightError
from launch.preflight.gpu import Gpu, check_driver, check_gpu, count_gpus, query_gpu
from launch.preflight.host import check_port, start_warnings
from launch.preflight.memory import MemoryNeed, check_memory, estimate_memory
from launch.preflight.model import check_model_directory
from launch.preflight.ranks import (
    RankEnvironment,
    check_distinct_gpus,
    ensure_torchrun_environment,
)
from launch.preflight.sources import check_sources
from launch.preflight.store import claim_store
from tp_engine.tiers.host_memory import free_host_bytes

__all__ = [
    "Gpu",
    "MemoryNeed",
    "PreflightError",
    "RankEnvironment",
    "check_distinct_gpus",
    "check_driver",
    "check_gpu",
    "check_memory",
    "check_model_directory",
    "check_port",
    "check_sources",
    "claim_store",
    "count_gpus",
    "ensure_torchrun_environment",
    "estimate_memory",
    "free_host_bytes",
    "query_gpu",
    "start_warnings",
]
