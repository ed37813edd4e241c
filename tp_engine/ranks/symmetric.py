"""Mailboxes in memory that the GPUs of one host map into each other's address space."""

from __future__ import annotations

import logging
import os
from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed import _symmetric_memory as symmetric_memory

from kernels.reduce import (
    SHARE_PIECE,
    SHARED_BYTES,
    SIGNALLED_BYTES,
    STAMPED_BYTES,
    Mailboxes,
    Signalled,
    Stamped,
    programs,
)
from tp_engine.ranks.comm import Comm

log = logging.getLogger(__name__)

_MAPPED: dict[tuple[int, int], Mailboxes] = {}
"""By ranks and row bytes. What has been mapped stays so to the end of the process, since another
rank may still write, and serves whoever connects next: uses are counted on."""
_HANDLES: list[object] = []


def share_mailboxes(comm: Comm, row_bytes: int) -> Comm:
    """``comm`` with mailboxes for short sums where every GPU reaches every other's memory, else as
    it is. Every rank must call it.

    Args:
        row_bytes: of a row of hidden states.
    """
    able = comm.gather_numbers([int(_reaches_peers(comm.device))])
    if not all(numbers[0] for numbers in able):
        log.info("all sums go through nccl: not every GPU reaches every other's memory")
        return comm
    boxes, error = _MAPPED.get((comm.world, row_bytes)), None
    try:
        boxes = boxes or _map_mailboxes(comm, row_bytes)
    except RuntimeError as failure:  # the driver's reasons are many; nccl needs none of it
        error = failure
    done = comm.gather_numbers([int(boxes is not None)])
    if not all(numbers[0] for numbers in done):
        log.warning("all sums go through nccl: memory could not be shared: %s", error)
        return comm
    assert boxes is not None
    _MAPPED[comm.world, row_bytes] = boxes
    return replace(comm, mailboxes=boxes)


def _reaches_peers(device: torch.device) -> bool:
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if device.index is None or local != int(os.environ.get("WORLD_SIZE", "1")):
        return False
    others = (index for index in range(local) if index != device.index)
    return all(torch.cuda.can_device_access_peer(device.index, other) for other in others)


def _map_mailboxes(comm: Comm, row_bytes: int) -> Mailboxes:
    """One shared piece of memory for all kinds."""
    ranks = comm.world
    row_words = 1 << (-(-row_bytes // 4) - 1).bit_length()
    few = programs(ranks, STAMPED_BYTES, row_words)
    many = programs(ranks, SIGNALLED_BYTES, row_words)
    shared = programs(ranks, SHARED_BYTES, SHARE_PIECE)
    stamped, others, plain, signals = _map(
        comm,
        (few * 2 * ranks * row_words, torch.int64),
        (shared * 2 * ranks * SHARE_PIECE, torch.int64),
        (many * 2 * ranks * row_words, torch.int32),
        (many * 2 * ranks, torch.int32),
    )

    def uses(count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int32, device=comm.device)

    return Mailboxes(
        rank=comm.rank,
        row_words=row_words,
        few=Stamped(by_rank=stamped, uses=uses(few)),
        many=Signalled(by_rank=plain, signals=signals, uses=uses(many)),
        shared=Stamped(by_rank=others, uses=uses(shared)),
    )


def _map(comm: Comm, *sizes: tuple[int, torch.dtype]) -> list[tuple[Tensor, ...]]:
    """Tensors of these sizes in the memory of every rank: for each, its mappings by rank."""
    assert comm.device_group is not None
    total = sum(count * dtype.itemsize for count, dtype in sizes)
    mine = symmetric_memory.empty(total, dtype=torch.uint8, device=comm.device)
    mine.zero_()
    torch.cuda.synchronize(comm.device)  # the others write as soon as they have the mapping
    handle = symmetric_memory.rendezvous(mine, comm.device_group)
    _HANDLES.append((mine, handle))
    parts, start = [], 0
    for count, dtype in sizes:
        first = start // dtype.itemsize
        parts.append(
            tuple(handle.get_buffer(rank, (count,), dtype, first) for rank in range(comm.world))
        )
        start += count * dtype.itemsize
    return parts
