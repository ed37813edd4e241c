"""Kernels that run beside others: as the next one begins, or in a branch of a captured step.

A kernel launched with ``launch_pdl`` (programmatic dependent launch) begins while the one before it
ends and waits (`gdc_wait`) before it touches anything that a kernel before it reads or writes.
Until then it may read what no kernel of a step writes: weights and tables.
"""

from collections.abc import Callable
from functools import cache
from typing import TypeVar

import torch

Result = TypeVar("Result")


def overlaps(device: torch.device) -> bool:
    """Say whether kernels on the device can be launched that way: from Hopper on."""
    return device.type == "cuda" and _capability(device) >= 9


def overlap_options(device: torch.device) -> dict[str, bool]:
    """Return what the launcher and a kernel with `USE_PDL` need to know of the device."""
    return {"USE_PDL": True, "launch_pdl": True} if overlaps(device) else {"USE_PDL": False}


def run_beside(
    branch: Callable[[], None],
    work: Callable[[], Result],
    device: torch.device,
    *,
    work_first: bool,
) -> Result:
    """Run both and return what `work` returns; neither may touch what the other writes.

    In a capture their kernels have no order, but those of one are given to the device first and
    take its multiprocessors first; branches of one device are in order. Outside of a capture, where
    the host is what takes time, one runs after the other. Either way both are done before what
    follows. Memory that `branch` uses must be kept until then.
    """
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        branch()
        return work()
    main, side = torch.cuda.current_stream(device), _side_stream(device)
    fork = main.record_event()

    def run_branch() -> None:
        side.wait_event(fork)
        with torch.cuda.stream(side):
            branch()

    if not work_first:
        run_branch()
    result = work()
    if work_first:
        run_branch()
    main.wait_stream(side)
    return result


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@cache
def _capability(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0]


__all__ = ["overlap_options", "overlaps", "run_beside"]
