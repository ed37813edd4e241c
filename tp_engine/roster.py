"""Which revisions the ranks have on their hosts, ready for the arena."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from tp_engine.adapters import AdapterImage, AdapterRevision
from tp_engine.memory import AdapterFootprint, AdapterResidency
from tp_engine.plan import PlanKind

POLL_SECONDS = 0.002
"""Between looks at a delivery that is waited for."""


class CarryOut(Protocol):
    """How all ranks are told."""

    def __call__(
        self, kind: PlanKind, numbers: Sequence[int], images: Sequence[AdapterImage] | None = None
    ) -> None:
        """Let them do it; with DELIVER, ``images`` are one a rank."""
        ...


class Arrivals(Protocol):
    """See `tp_engine.delivery.Delivery`."""

    def arrived(self) -> list[int]:
        """Handles that all ranks have had since the last call."""
        ...


class AdapterRoster:
    """Rank 0's list. A revision is delivered, then adopted, then may be used, then forgotten.

    deliver ─> (beside the steps) ─> adopt_delivered ─> adapters ─> unregister
    """

    def __init__(
        self,
        carry_out: CarryOut,
        delivery: Arrivals,
        residency: AdapterResidency,
        *,
        num_pages: int,
    ) -> None:
        """Begin with none; ``num_pages`` are the arena's."""
        self._carry_out = carry_out
        self._delivery = delivery
        self._residency = residency
        self._num_pages = num_pages
        self._adapters: dict[str, AdapterFootprint] = {}
        self._under_way: dict[int, AdapterFootprint] = {}
        self._handles = itertools.count()

    @property
    def adapters(self) -> Mapping[str, AdapterFootprint]:
        """The revisions that requests may use, by digest."""
        return self._adapters

    def register(
        self, name: str, revision: AdapterRevision, images: Sequence[AdapterImage]
    ) -> None:
        """Give every rank its images of a revision, and return when all have them.

        Raises:
            ValueError: as `deliver`.
            RuntimeError: as `adopt_delivered`.
        """
        self.deliver(name, revision, images)
        while not self.adopt_delivered() and revision.digest not in self._adapters:
            time.sleep(POLL_SECONDS)

    def deliver(self, name: str, revision: AdapterRevision, images: Sequence[AdapterImage]) -> None:
        """Begin to give every rank its images of a revision, unless that was begun before.

        Raises:
            ValueError: the adapter alone is larger than the arena or the descriptor space.
        """
        begun = {adapter.digest for adapter in self._under_way.values()}
        if revision.digest in begun or revision.digest in self._adapters:
            return
        pages, words = int(images[0].pages.shape[0]), images[0].record.numel()
        if pages + 1 > self._num_pages or words > self._residency.descriptor_words:
            raise ValueError(
                f"adapter {name} needs {pages} pages and {words} descriptor words beside one "
                f"page of keys and values; the arena has {self._num_pages} pages and "
                f"{self._residency.descriptor_words} words: raise the memory for the arena"
            )
        handle = next(self._handles)
        self._under_way[handle] = AdapterFootprint(
            handle=handle,
            digest=revision.digest,
            name=name,
            pages=pages,
            words=words,
            max_rank=revision.max_rank,
            traits=int(revision.traits),
        )
        self._carry_out(PlanKind.DELIVER, (handle, pages, words), images)

    def adopt_delivered(self) -> list[str]:
        """Let requests use the revisions that all ranks have got since the last call; which.

        Raises:
            RuntimeError: a rank could not be given its images.
        """
        adopted = []
        for handle in self._delivery.arrived():
            self._carry_out(PlanKind.REGISTER, (handle,))
            adapter = self._under_way.pop(handle)
            self._adapters[adapter.digest] = adapter
            adopted.append(adapter.digest)
        return adopted

    def unregister(self, digest: str) -> None:
        """Forget a revision, which no open request may use, on all ranks."""
        adapter = self._adapters.pop(digest)
        self._residency.forget(adapter.handle)
        self._carry_out(PlanKind.UNREGISTER, (adapter.handle,))
