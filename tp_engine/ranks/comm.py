"""The collectives that the engine uses, and nothing else: no-ops at world size 1.

The device group carries activations (nccl on GPUs, gloo on CPUs), the control group plans, and a
group for each lane what goes on beside the steps (these always gloo, CPU tensors). Every wait ends
with an error after the group's time limit.
"""

from __future__ import annotations

import atexit
import os
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum

import torch
import torch.distributed as dist
from torch import Tensor

from kernels.reduce import Mailboxes
from kernels.reduce.reference import sum_in_order


class Lane(IntEnum):
    """What goes on beside the steps, each in one thread of every rank."""

    DELIVERY = 0
    """Adapters' bytes from rank 0 to all hosts."""
    COPIES = 1
    """Their copies into the arenas."""


class RankLost(RuntimeError):
    """A rank is gone, or silent for too long."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comm:
    """One rank's view of the ranks that serve together."""

    rank: int
    world: int
    device: torch.device
    """Where activations live."""
    ordered: bool
    """Sum in rank order whatever the backend: stock reductions of three or more ranks do not."""
    device_group: dist.ProcessGroup | None = None
    control_group: dist.ProcessGroup | None = None
    background_groups: tuple[dist.ProcessGroup, ...] = ()
    """By `Lane`."""
    mailboxes: Mailboxes | None = None
    """For short sums between the GPUs of one host."""

    @classmethod
    def alone(cls, device: torch.device) -> Comm:
        """World size 1: no process group is needed."""
        return cls(rank=0, world=1, device=device, ordered=True)

    @classmethod
    def connect(
        cls, device: torch.device, *, backend: str, timeout: float, deterministic: bool
    ) -> Comm:
        """Join the ranks that torchrun started; start-up may take 30 minutes, later waits
        ``timeout`` seconds each.

        Raises:
            torch.distributed.DistError: the ranks did not find each other in time.
        """
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return cls.alone(device)
        if not dist.is_initialized():
            dist.init_process_group("gloo", timeout=timedelta(minutes=30))
            atexit.register(_leave)
        limit = timedelta(seconds=timeout)
        control = dist.new_group(backend="gloo", timeout=limit)
        return cls(
            rank=dist.get_rank(),
            world=dist.get_world_size(),
            device=device,
            # gloo gathers and adds locally faster than it reduces, so order is free there.
            ordered=deterministic or backend == "gloo",
            device_group=control
            if backend == "gloo" and device.type == "cpu"
            else dist.new_group(backend=backend, timeout=limit),
            control_group=control,
            background_groups=tuple(dist.new_group(backend="gloo", timeout=limit) for _ in Lane),
        )

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of ``x`` over ranks; may reuse the memory of ``x``. Equal bits on all ranks."""
        if self.world == 1 or not x.numel():
            return x
        if self.mailboxes is not None and self.mailboxes.hold_rows(x):
            from kernels.reduce.gpu import sum_over_ranks  # Triton is not on every platform

            return sum_over_ranks(x, self.mailboxes)
        if not self.ordered:
            dist.all_reduce(x, group=self.device_group)
            return x
        return sum_in_order(self._all_gather(x))

    def gather_to_zero(self, x: Tensor) -> list[Tensor] | None:
        """``x`` of every rank in rank order on rank 0, None elsewhere. Shapes must be equal."""
        if self.world == 1:
            return [x]
        if (shared := self._shared(x)) is not None:
            return list(shared) if self.rank == 0 else None
        parts = [torch.empty_like(x) for _ in range(self.world)] if self.rank == 0 else None
        dist.gather(x.contiguous(), parts, dst=0, group=self.device_group)
        return parts

    def broadcast_from_zero(self, x: Tensor) -> Tensor:
        """Overwrite ``x`` with rank 0's and return it."""
        if (shared := self._shared(x)) is not None:
            return x if self.rank == 0 else x.copy_(shared[0])
        if self.world > 1:
            dist.broadcast(x, src=0, group=self.device_group)
        return x

    def broadcast_control(self, x: Tensor) -> Tensor:
        """As `broadcast_from_zero`, for CPU tensors on the control group."""
        if self.world > 1:
            dist.broadcast(x, src=0, group=self.control_group)
        return x

    def scatter_background(self, parts: list[Tensor] | None, mine: Tensor) -> Tensor:
        """This rank's part of what rank 0 has for each (CPU, equal shapes), perhaps ``mine``."""
        if self.world == 1:
            assert parts is not None
            return parts[0]
        dist.scatter(mine, parts, src=0, group=self.background_groups[Lane.DELIVERY])
        return mine

    def exchange_background(self, x: Tensor, room: list[Tensor]) -> list[Tensor]:
        """``x`` of every rank (CPU, equal shapes) in rank order, on all ranks.

        Args:
            room: a tensor like ``x`` for each, so that nobody asks for memory while others wait.
        """
        if self.world == 1:
            return [x]
        dist.all_gather(room, x, group=self.background_groups[Lane.DELIVERY])
        return room

    def gather_background(self, lane: Lane, values: list[int]) -> list[list[int]]:
        """Every rank's integers, on all ranks in rank order, once all have called this."""
        if self.world == 1:
            return [values]
        mine = torch.tensor(values)
        parts = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(parts, mine, group=self.background_groups[lane])
        return [part.tolist() for part in parts]

    def gather_numbers(self, values: list[int]) -> list[list[int]]:
        """Every rank's integers, on all ranks, in rank order; for start-up agreement.

        Raises:
            RankLost: a rank ended before it gave its own.
        """
        if self.world == 1:
            return [values]
        mine = torch.tensor(values, dtype=torch.int64)
        parts = [torch.empty_like(mine) for _ in range(self.world)]
        try:
            dist.all_gather(parts, mine)
        except RuntimeError as error:
            raise RankLost("another rank has ended; its own log says why") from error
        return [part.tolist() for part in parts]

    def _shared(self, x: Tensor) -> Tensor | None:
        """``x`` of every rank, where that is short enough for mailboxes."""
        boxes = self.mailboxes
        if boxes is None or not boxes.share(x):
            return None
        from kernels.reduce.gpu import share_with_ranks

        return share_with_ranks(x, boxes)

    def _all_gather(self, x: Tensor) -> list[Tensor]:
        parts = list(torch.empty((self.world, *x.shape), dtype=x.dtype, device=x.device))
        dist.all_gather(parts, x.contiguous(), group=self.device_group)
        return parts


def _leave() -> None:
    """A group's threads that still run when the interpreter ends would abort the process."""
    if dist.is_initialized():
        dist.destroy_process_group()
