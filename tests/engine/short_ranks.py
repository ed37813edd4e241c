"""Two ranks, one of which is not given memory at some place of a delivery; run by torchrun.

Prints a line a place and rank. What the shortage leaves is looked at on both ranks, and so is what
the next try brings, which must be what a delivery without any shortage before it brings.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from unittest import mock

import torch
import torch.distributed as dist

from kernels import ops_for
from sharding import cut_model
from tests.adapters.writing import every_site, random_modules, revision_of
from tests.engine.test_gains import DIMS, PAGE, base_weights, shard
from tp_engine.adapters import AdapterImage, pack_adapter
from tp_engine.adapters.record import gain_places
from tp_engine.ranks.background import Ended
from tp_engine.ranks.comm import Comm
from tp_engine.tiers.delivery import Delivery
from tp_engine.tiers.gains import RankGains
from tp_engine.tiers.host_pages import HostPages

HUGE = 1 << 50
PLACES = {
    "room": "tp_engine.tiers.delivery.zeroed_pages",
    "gains": "tp_engine.tiers.gains.squared_norms",
    "keeping": "tp_engine.tiers.host_pages.HostPages.store",
}


def short(*of: object) -> object:
    return torch.empty(HUGE, dtype=torch.uint8)


class World:
    """One of the ranks."""

    def __init__(self) -> None:
        device = torch.device("cpu")
        self.comm = Comm.connect(device, backend="gloo", timeout=20.0, deterministic=False)
        cuts = cut_model(DIMS, self.comm.world)
        modules = random_modules(DIMS, every_site(DIMS, 3), extras=True, seed=1)
        self.images = pack_adapter(revision_of(modules), cuts, DIMS, torch.float32, PAGE)
        assert gain_places(self.images[0].record, DIMS.layers)
        cut = cuts[self.comm.rank]
        weights = shard(base_weights(), cut, fused=True)
        gains = RankGains(weights, cut, DIMS, ops_for(device), self.comm, torch.float32)
        self.pages = list(range(len(self.images[0].pages)))
        self.host = HostPages(len(self.pages), PAGE, pinned=False)
        self.delivery = Delivery(self.comm, self.host, gains.finish)

    def deliver(self, handle: int) -> Ended | None:
        """A delivery to its end; what rank 0 hears of it."""
        images = self.images if self.comm.rank == 0 else None
        self.delivery.begin(handle, len(self.images[0].record), self.pages, images)
        found: list[Ended] = []
        until = time.monotonic() + 20
        while self.comm.rank == 0 and not found:
            assert time.monotonic() < until, "nothing has ended"
            found = self.delivery.arrived()
            time.sleep(0.001)
        dist.barrier()
        self.delivery.arrived()  # raises what has failed here
        return found[0] if found else None

    def kept(self, handle: int) -> AdapterImage:
        """What this rank has of an adapter, which is forgotten."""
        record = self.host.copy_of(handle).record
        image = AdapterImage(pages=self.host.memory.clone(), record=record)
        self.host.drop(handle)
        self.host.memory.zero_()
        return image


def check(world: World, whole: AdapterImage, where: str, rank: int, handle: int) -> None:
    broken: AbstractContextManager[object] = nullcontext()
    if world.comm.rank == rank:
        broken = mock.patch(PLACES[where], short)
    with broken:
        ended = world.deliver(handle)
    if ended is not None:
        assert ended.number == handle and ended.shortage is not None
        assert f"on rank {rank}" in str(ended.shortage) and ended.shortage.nbytes > 0
    world.host.drop(handle)
    assert world.deliver(handle) in (None, (handle, None))
    image = world.kept(handle)
    assert torch.equal(image.pages, whole.pages) and torch.equal(image.record, whole.record)


def main() -> None:
    world = World()
    assert world.deliver(0) in (None, (0, None))
    whole = world.kept(0)
    tries = [(where, rank) for where in PLACES for rank in range(world.comm.world)]
    for handle, (where, rank) in enumerate(tries, 1):
        check(world, whole, where, rank, handle)
        if world.comm.rank == 0:
            print(f"{where} on rank {rank}: told, gone, and there at the next try", flush=True)
    dist.barrier()


if __name__ == "__main__":
    main()
