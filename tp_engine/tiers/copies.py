"""Adapters on their way from a rank's host memory into its arena, beside the steps.

On a GPU the copies run on a stream of their own. They begin when the steps that were launched
before the plan have ended, for these may still read what stood in the pages; no step waits for
them, and rank 0 lets no step use the adapter before the copies of all ranks are complete.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor

from tp_engine.adapters import relocate
from tp_engine.ranks.background import Background, Ended
from tp_engine.ranks.comm import Comm, Lane
from tp_engine.shortage import asking_for
from tp_engine.steps.transfer import to_device
from tp_engine.tiers.host_pages import HostCopy, HostPages, runs
from tp_engine.tiers.resident_ends import ResidentEnds

Job = tuple[int, int, list[int], torch.cuda.Event | None]
RECORD = "the record of an adapter"

PART_BYTES = 2 * 2**20
"""Of a copy that the GPU is given at once: a step's own small copies wait behind such parts."""
QUEUED_PARTS = 2
"""Parts that the GPU has in hand, so that it need not wait for the host between them."""


class Copies:
    """One rank's end."""

    def __init__(
        self,
        comm: Comm,
        host: HostPages,
        memory: Tensor,
        descriptors: Tensor,
        layers: int,
        ends: ResidentEnds,
    ) -> None:
        """Copy from ``host`` into an arena.

        Args:
            comm: of this rank.
            host: its page images.
            memory: uint8 [pages * page_bytes], the arena.
            descriptors: int64 [words], on the same device.
            layers: of the model.
            ends: are told what comes.
        """
        self._host = host
        self._ends = ends
        self._pages = memory.view(-1, host.page_bytes)
        self._descriptors = descriptors
        self._layers = layers
        self._device = memory.device
        self._stream: torch.cuda.Stream | None = None
        self._lane: Background[Job] = Background(comm, Lane.COPIES, self._carry_out)

    def begin(self, handle: int, descriptor: int, pages: list[int]) -> None:
        """Start to copy an adapter; every rank must do it with the same numbers, in order.

        Args:
            handle: of an adapter that the hosts have and keep until this has ended.
            descriptor: where its record goes.
            pages: of the arena.
        """
        before = None
        if self._device.type == "cuda":
            before = torch.cuda.Event()  # type: ignore[no-untyped-call]  # of torch
            before.record(torch.cuda.current_stream(self._device))
        self._lane.begin(handle, (handle, descriptor, pages, before))

    def landed(self) -> list[Ended]:
        """Rank 0: the copies that have ended on all ranks since the last call, by handle.

        Raises:
            RuntimeError: a copy failed, or a rank is gone.
        """
        return self._lane.finished()

    @torch.inference_mode()
    def _carry_out(self, job: Job) -> None:
        handle, descriptor, pages, before = job
        copy = self._host.copy_of(handle)
        with asking_for(RECORD, copy.record.nbytes):
            record = relocate(copy.record, pages, self._layers, self._host.page_bytes)
        stretch = self._descriptors[descriptor : descriptor + record.numel()]
        parts = self._parts(copy.pages, pages)
        if before is None:
            for source, target in parts:
                target.copy_(source)
            stretch.copy_(record)
            with asking_for(RECORD, record.nbytes):
                self._tell_ends(descriptor, record, copy)
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(before)
            with asking_for(RECORD, record.nbytes):  # before any page is under way
                stretch.copy_(to_device(record.numpy(), self._device))
                self._tell_ends(descriptor, record, copy)
            queued: deque[torch.cuda.Event] = deque()
            for source, target in parts:
                target.copy_(source, non_blocking=True)
                event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                event.record(self._stream)
                queued.append(event)
                if len(queued) == QUEUED_PARTS:
                    queued.popleft().synchronize()
            queued.pop().synchronize()

    def _tell_ends(self, descriptor: int, record: Tensor, copy: HostCopy) -> None:
        on_host = relocate(copy.record, copy.pages, self._layers, self._host.page_bytes)
        self._ends.publish(descriptor, record, on_host, self._host.memory)

    def _parts(self, host: list[int], arena: list[int]) -> Iterator[tuple[Tensor, Tensor]]:
        """Bytes of the host, and where they go."""
        for start, stop in runs(host, arena):
            source = self._host.memory[host[start] : host[start] + stop - start].view(-1)
            target = self._pages[arena[start] : arena[start] + stop - start].view(-1)
            parts = (torch.split(stretch, PART_BYTES) for stretch in (source, target))
            yield from zip(*parts, strict=True)
