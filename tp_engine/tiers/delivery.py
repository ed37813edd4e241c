"""Adapters on their way from rank 0 to the hosts of all ranks, beside the steps and never in them.

Rank 0 cuts and packs; each rank is sent its own page images only, into the host pages that the
plan names. See `tp_engine.ranks.background` for the order of events, and for what becomes of an
adapter that a rank has no memory for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tp_engine.adapters import AdapterImage
from tp_engine.ranks.background import Background, Ended, Together
from tp_engine.ranks.comm import Comm, Lane
from tp_engine.shortage import asking_for
from tp_engine.tiers.host_memory import zeroed_pages
from tp_engine.tiers.host_pages import HostPages

Job = tuple[int, int, list[int], Sequence[AdapterImage] | None]
IMAGE = "a page image"


class Delivery:
    """One rank's end."""

    def __init__(
        self,
        comm: Comm,
        host: HostPages,
        finish: Callable[[AdapterImage, Together], AdapterImage],
    ) -> None:
        """``finish`` makes of what was sent what is kept (`tp_engine.tiers.gains`)."""
        self._comm = comm
        self._host = host
        self._finish = finish
        self._lane: Background[Job] = Background(comm, Lane.DELIVERY, self._carry_out)

    def begin(
        self, handle: int, words: int, pages: list[int], images: Sequence[AdapterImage] | None
    ) -> None:
        """Start a delivery; every rank must do it with the same numbers and in the same order.

        Args:
            handle: the adapter's number.
            words: of each rank's record.
            pages: of the hosts, that will hold the images.
            images: on rank 0 one a rank, None elsewhere.
        """
        self._lane.begin(handle, (handle, words, pages, images))

    def arrived(self) -> list[Ended]:
        """Rank 0: the deliveries that have ended on all ranks since the last call, by handle.

        Raises:
            RuntimeError: a delivery failed, as when a rank is gone.
        """
        return self._lane.finished()

    def _carry_out(self, job: Job) -> None:
        handle, words, pages, images = job
        nbytes = len(pages) * self._host.page_bytes

        def room() -> tuple[Tensor, Tensor]:
            pages_room = zeroed_pages(len(pages), self._host.page_bytes)
            return pages_room, torch.empty(words, dtype=torch.int64)

        mine = self._lane.together(IMAGE, nbytes, room)
        image = AdapterImage(
            pages=self._comm.scatter_background(
                None if images is None else [image.pages for image in images], mine[0]
            ),
            record=self._comm.scatter_background(
                None if images is None else [image.record for image in images], mine[1]
            ),
        )
        image = self._finish(image, self._lane.together)
        with asking_for(IMAGE, nbytes):
            self._host.store(handle, pages, image)
