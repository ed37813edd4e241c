"""The prefix cache: KV pages found again by everything their content depends on.

A block's key is the SHA-256 chain over (base, adapter revision, tenant salt, KV dtype) and the
token ids of all blocks up to it, so equal keys mean equal keys and values.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence

from tp_engine.memory.pool import PagePool


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

    def __init__(self, pool: PagePool, clock: Callable[[], int], *, enabled: bool = True) -> None:
        self._pool = pool
        self._enabled = enabled
        self._clock = clock
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        # Pages without references, least recently used first, with the time of that use.
        self._idle: OrderedDict[int, int] = OrderedDict()
        pool.add_cache(self)

    @property
    def idle_pages(self) -> set[int]:
        """Pages kept for nobody in particular."""
        return set(self._idle)

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """The pages of the longest known run of ``keys``, with one reference taken on each."""
        pages: list[int] = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            self._idle.pop(page, None)
            self._pool.share(page)
            pages.append(page)
        return pages

    def publish(self, key: bytes, page: int) -> None:
        """Offer a page whose tokens are confirmed; the first page of a key stays the one."""
        if self._enabled and key not in self._page_of and page not in self._key_of:
            self._page_of[key] = page
            self._key_of[page] = key

    def give_back(self, pages: Sequence[int]) -> None:
        """Drop one reference each. Known pages stay; the last ones of a sequence go first."""
        for page in reversed(pages):
            if not self._pool.drop(page):
                continue
            if page in self._key_of:
                self._idle[page] = self._clock()
            else:
                self._pool.release(page)

    def evictable(self) -> int:
        """Pages without references."""
        return len(self._idle)

    def oldest_use(self) -> int | None:
        """Last use of the least recently used idle page."""
        return next(iter(self._idle.values()), None)

    def evict_oldest(self) -> None:
        """Forget the least recently used idle page and free it."""
        page, _ = self._idle.popitem(last=False)
        del self._page_of[self._key_of.pop(page)]
        self._pool.release(page)
