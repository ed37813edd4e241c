"""The prefix cache: KV pages found again by everything their content depends on.

A block's key is the SHA-256 chain over (base, adapter revision, tenant salt, KV dtype) and the
token ids of all blocks up to it, so equal keys mean equal keys and values.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence

from tp_engine.memory.pool import PagePool
from tp_engine.memory.prices import Prices
from tp_engine.memory.worth import UNUSED, Candidates, Worth, count_use, log_worth


def root_key(base_digest: str, revision_digest: str, salt: str, kv_dtype: str) -> bytes:
    """The key before the first block; lengths keep the parts apart."""
    digest = hashlib.sha256()
    for part in (base_digest, revision_digest, salt, kv_dtype):
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


def block_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The key of the block that follows ``parent`` and holds ``tokens``."""
    return hashlib.sha256(parent + array("q", tokens).tobytes()).digest()


class PrefixCache:
    """Maps block keys to pages; pages in use and pages kept for later alike."""

    def __init__(
        self, pool: PagePool, prices: Prices, clock: Callable[[], float], *, enabled: bool = True
    ) -> None:
        """Begin with none; ``clock`` gives seconds."""
        self._pool = pool
        self._prices = prices
        self._enabled = enabled
        self._clock = clock
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._owner_of: dict[int, str] = {}
        self._owned: dict[str, set[int]] = {}
        self._weight: dict[int, float] = {}
        self._idle: Candidates[int] = Candidates()
        """Pages without references."""
        pool.add_cache(self)

    @property
    def idle_pages(self) -> set[int]:
        """Pages kept for nobody in particular."""
        return set(self._idle)

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """The pages of the longest known run of ``keys``, as they are."""
        pages: list[int] = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def idle_among(self, pages: Sequence[int]) -> int:
        """How many of some pages are without references."""
        return sum(map(self._idle.__contains__, pages))

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """As `find`, with one reference taken on each page."""
        pages = self.find(keys)
        for page in pages:
            self._idle.discard(page)
            self._pool.share(page)
        return pages

    def publish(self, key: bytes, page: int, owner: str = "") -> None:
        """Offer a page whose tokens are confirmed; the first page of a key stays the one.

        Args:
            key: of its tokens and all before them.
            page: that holds them.
            owner: of the key: the digest of an adapter's revision, empty for the base.
        """
        if self._enabled and key not in self._page_of and page not in self._key_of:
            self._page_of[key] = page
            self._key_of[page] = key
            self._owner_of[page] = owner
            self._owned.setdefault(owner, set()).add(page)

    def give_back(self, pages: Sequence[int]) -> None:
        """Drop one reference each; known pages stay, as used once more.

        A sequence that has a block has all before it, so a block is never worth more than the one
        that it follows; of equal ones the last block goes first.
        """
        now = self._clock()
        after: dict[float, tuple[float, Worth]] = {}  # most pages of a sequence are of one weight
        for page in reversed(pages):
            known = page in self._key_of
            if known:
                before = self._weight.get(page, UNUSED)
                if before not in after:
                    weight = count_use(before, now)
                    after[before] = weight, (False, log_worth(weight, self._prices.kv, 1))
                self._weight[page], worth = after[before]
            if not self._pool.drop(page):
                continue
            if known:
                self._idle.put(page, worth)
            else:
                self._pool.release(page)

    def evictable(self) -> int:
        """Pages without references."""
        return len(self._idle)

    def cheapest(self) -> Worth | None:
        """Worth of the page that would go first."""
        found = self._idle.cheapest()
        return None if found is None else found[0]

    def evict_cheapest(self) -> None:
        """Forget that page and free it."""
        found = self._idle.cheapest()
        assert found is not None
        self._forget(found[1])

    def forget(self, owner: str) -> None:
        """Forget all pages of an owner; nobody may hold one."""
        for page in list(self._owned.get(owner, ())):
            self._forget(page)

    def _forget(self, page: int) -> None:
        assert page in self._idle, f"page {page} is held"
        self._idle.discard(page)
        self._weight.pop(page)
        del self._page_of[self._key_of.pop(page)]
        owner = self._owner_of.pop(page)
        self._owned[owner].remove(page)
        if not self._owned[owner]:
            del self._owned[owner]
        self._pool.release(page)

    def clear(self) -> None:
        """Forget all pages without references."""
        while self._idle:
            self.evict_cheapest()
