"""Which revisions the engine knows, so that requests may ask for them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence

from tp_engine.adapters import AdapterImage, AdapterRevision, ImageSize
from tp_engine.adapters.errors import OutOfMemory
from tp_engine.memory import AdapterFootprint, Demand
from tp_engine.requests.admission import EngineLimits
from tp_engine.tiers.tiers import AdapterTiers

POLL_SECONDS = 0.0005
"""Between looks at what is waited for."""


class AdapterRoster:
    """Rank 0's list. A revision is delivered, then adopted, then may be used, then forgotten.

        deliver ─> (beside the steps) ─> adopt_delivered ─> adapters ─> unregister
                                      └> a rank has no memory for it: on none, see `has`

    With no room on the hosts it is adopted at once, cold; so is one that begins without images.
    """

    def __init__(
        self,
        tiers: AdapterTiers,
        demand: Demand,
        limits: EngineLimits,
        beat: Callable[[], None],
    ) -> None:
        """Begin with none.

        Args:
            tiers: bring adapters to where they are needed.
            demand: who wants what.
            limits: sizes that a revision must fit into.
            beat: called while something is waited for, so that the other ranks hear of rank 0.
        """
        self._tiers = tiers
        self._demand = demand
        self._limits = limits
        self._beat = beat
        self._adapters: dict[str, AdapterFootprint] = {}
        self._under_way: dict[int, AdapterFootprint] = {}
        self._short: dict[str, OutOfMemory] = {}
        """Revisions whose last delivery has failed, by digest."""
        self._adopted: list[str] = []
        self._leaving: list[AdapterFootprint] = []
        self._kept: set[str] = set()
        self._handles = itertools.count()
        self.changes = 0
        """How often `adapters` has changed."""

    @property
    def largest(self) -> int:
        """Pages of the largest revision."""
        return max((adapter.pages for adapter in self._adapters.values()), default=0)

    @property
    def adapters(self) -> Mapping[str, AdapterFootprint]:
        """The revisions that requests may use, by digest."""
        return self._adapters

    def register(
        self, name: str, revision: AdapterRevision, images: Sequence[AdapterImage]
    ) -> None:
        """Give every host its images of a revision, and return when all have them.

        Raises:
            ValueError: as `deliver`, or as `has`.
            RuntimeError: as `adopt_delivered`.
        """
        self.start(name, revision.digest, ImageSize.of(revision, images), images)

    def deliver(self, name: str, revision: AdapterRevision, images: Sequence[AdapterImage]) -> None:
        """Begin to give every host its images of a revision, unless that was begun before.

        Without room on the hosts the revision is known as a cold one at once.

        Raises:
            ValueError: the adapter alone is larger than the arena, the descriptor space or the
                memory of the hosts.
        """
        self.begin(name, revision.digest, ImageSize.of(revision, images), images)

    def begin(
        self, name: str, digest: str, size: ImageSize, images: Sequence[AdapterImage] | None
    ) -> None:
        """As `deliver`; without images the revision is read when a request wants it."""
        begun = {adapter.digest for adapter in self._under_way.values()}
        if digest in begun or digest in self._adapters:
            return
        adapter = self._footprint(name, digest, size)
        self._short.pop(digest, None)
        if images is not None and self._tiers.deliver(adapter, images):
            self._under_way[adapter.handle] = adapter
        else:
            self._adopt(adapter)

    def start(
        self, name: str, digest: str, size: ImageSize, images: Sequence[AdapterImage] | None
    ) -> None:
        """As `begin`, and return when the revision may be used; raises as `has` does, too."""
        self.begin(name, digest, size, images)
        while not self.adopt_delivered() and not self.has(digest):
            time.sleep(POLL_SECONDS)
            self._beat()

    def adopt_delivered(self) -> list[str]:
        """Let requests use the revisions that all hosts have got since the last call; which.

        Raises:
            RuntimeError: a rank could not be given its images, for another reason than `has` tells.
        """
        self._tiers.turn()
        self._forget_leaving()
        adopted, self._adopted = self._adopted, []
        return adopted

    def has(self, digest: str) -> bool:
        """Whether a revision that was begun may be used as yet.

        Raises:
            OutOfMemory: it will not be: a rank had no memory for its images, and none has them.
        """
        short = self._short.get(digest)
        if short is not None:
            raise OutOfMemory(*short.needs)  # what is raised keeps the frames that it passes
        return digest in self._adapters

    def failed(self, handle: int, error: OutOfMemory) -> None:
        """An adapter has not come to all hosts, and has gone from those to which it had."""
        adapter = self._under_way.pop(handle, None)
        if adapter is not None:
            self._short[adapter.digest] = error

    def moved(self, handle: int) -> None:
        """An adapter has come to all hosts."""
        adapter = self._under_way.pop(handle, None)
        if adapter is not None:
            self._adopt(adapter)

    def unregister(self, digest: str) -> None:
        """Forget a revision, which no open request may use, on all ranks."""
        if digest in self._kept:
            self._release(digest)
        adapter = self._adapters.pop(digest)
        self.changes += 1
        self._leaving.append(adapter)
        self._forget_leaving()

    # --- what stays --------------------------------------------------------------------------

    def keep(self, digests: set[str]) -> None:
        """Keep the hosts' copies of these revisions and of no others, whoever asks for what: they
        are pinned, or not written back yet. Cold ones are fetched.
        """
        for digest in self._kept - digests:
            self._release(digest)
        for digest in sorted(digests - self._kept):
            if digest in self._adapters:
                self._kept.add(digest)
                self._demand.hold(self._adapters[digest].handle)
                self._tiers.want_on_hosts(self._adapters[digest])

    def _release(self, digest: str) -> None:
        self._kept.remove(digest)
        self._demand.release(self._adapters[digest].handle)

    def is_warm(self, digest: str) -> bool:
        """Whether all hosts have a revision."""
        return self._tiers.host.is_warm(self._adapters[digest].handle)

    # -----------------------------------------------------------------------------------------

    def _adopt(self, adapter: AdapterFootprint) -> None:
        self._adapters[adapter.digest] = adapter
        self.changes += 1
        self._adopted.append(adapter.digest)

    def _footprint(self, name: str, digest: str, size: ImageSize) -> AdapterFootprint:
        pages, words = self._limits.num_pages, self._limits.descriptor_words
        if size.pages + 1 > pages or size.words > words:
            raise ValueError(
                f"adapter {name} needs {size.pages} pages and {size.words} descriptor words beside "
                f"one page of keys and values; the arena has {pages} pages and {words} words: "
                "raise the memory for the arena"
            )
        if size.pages > self._tiers.host.num_pages:
            raise ValueError(
                f"adapter {name} needs {size.pages} pages of the hosts' memory, which has "
                f"{self._tiers.host.num_pages}: raise --adapter-host-memory"
            )
        handle = next(self._handles)
        return AdapterFootprint(handle=handle, digest=digest, name=name, **size._asdict())

    def _forget_leaving(self) -> None:
        """What is being sent or copied is forgotten when that has ended."""
        moving = [each for each in self._leaving if self._tiers.is_moving(each.handle)]
        for adapter in self._leaving:
            if adapter not in moving:
                self._tiers.forget(adapter.handle)
                self._demand.forget(adapter.handle)
        self._leaving = moving
