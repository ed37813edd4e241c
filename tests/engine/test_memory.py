"""Pages, the prefix cache and adapter residency keep sound books in any order of events."""

from __future__ import annotations

from itertools import count

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sharding import ModelDims, cut_model
from tp_engine.memory import (
    AdapterFootprint,
    AdapterResidency,
    PageLayout,
    PagePool,
    PageUse,
    PrefixCache,
    Resident,
    block_key,
    kv_views,
    root_key,
)
from tp_engine.memory.residency import DescriptorSpace


def footprint(handle: int, pages: int = 1, words: int = 8) -> AdapterFootprint:
    return AdapterFootprint(
        handle=handle, digest=str(handle), name=str(handle), pages=pages, words=words, max_rank=4
    )


class Books:
    """A pool with both caches, as the engine puts them together."""

    def __init__(self, pages: int, words: int = 1000, idle_pages: int = 1000) -> None:
        clock = count().__next__
        self.pool = PagePool(pages)
        self.prefix = PrefixCache(self.pool, clock)
        self.residency = AdapterResidency(self.pool, words, idle_pages, clock)


def test_taking_more_than_there_is_changes_nothing() -> None:
    pool = PagePool(3)
    assert pool.take(4, PageUse.KV) is None
    assert pool.free == 3
    assert pool.take(3, PageUse.KV) == [0, 1, 2]
    assert pool.take(1, PageUse.KV) is None


def test_a_released_page_has_another_generation() -> None:
    pool = PagePool(1)
    (page,) = pool.take(1, PageUse.KV) or []
    before = pool.generation(page)
    assert pool.current([page], [before])
    pool.drop(page)
    assert not pool.current([page], [before])
    pool.release(page)
    assert pool.take(1, PageUse.KV) == [page]
    assert not pool.current([page], [before])


def test_dropping_or_releasing_what_is_not_held_is_a_fault() -> None:
    pool = PagePool(1)
    with pytest.raises(AssertionError):
        pool.drop(0)
    pool.take(1, PageUse.KV)
    with pytest.raises(AssertionError):
        pool.release(0)


def test_the_integrity_check_finds_each_kind_of_fault() -> None:
    pool = PagePool(2)
    (page,) = pool.take(1, PageUse.KV) or []
    assert pool.check({page: 1}, set()) == []
    assert "references" in pool.check({}, set())[0]
    pool.drop(page)
    assert "leaked" in pool.check({}, set())[0]
    assert pool.check({}, {page}) == []
    pool.release(page)
    pool.release(page)
    assert "twice" in pool.check({}, set())[0]


def test_prefix_keys_depend_on_every_part_of_the_identity() -> None:
    parts = ("base", "revision", "salt", "float32")
    roots = {root_key(*parts)}
    for i in range(4):
        changed = list(parts)
        changed[i] += "x"
        roots.add(root_key(*changed))
    roots.add(root_key("baser", "evision", "salt", "float32"))
    assert len(roots) == 6
    assert block_key(root_key(*parts), [1, 2]) != block_key(root_key(*parts), [1, 3])
    assert block_key(root_key(*parts), [1]) != block_key(root_key("b", "", "", ""), [1])


def test_cached_pages_are_found_again_and_shared() -> None:
    books = Books(4)
    pages = books.pool.take(2, PageUse.KV) or []
    books.prefix.publish(b"a", pages[0])
    books.prefix.publish(b"b", pages[1])
    books.prefix.give_back(pages)
    assert books.prefix.idle_pages == set(pages)
    assert books.prefix.match([b"a", b"b", b"c"]) == pages
    assert books.prefix.match([b"a"]) == pages[:1]
    assert books.pool.check({pages[0]: 2, pages[1]: 1}, books.prefix.idle_pages) == []


def test_a_later_block_is_evicted_before_the_one_it_follows() -> None:
    books = Books(2)
    pages = books.pool.take(2, PageUse.KV) or []
    for key, page in zip((b"a", b"b"), pages, strict=True):
        books.prefix.publish(key, page)
    books.prefix.give_back(pages)
    assert books.pool.take(1, PageUse.KV) == [pages[1]]
    assert books.prefix.match([b"a", b"b"]) == [pages[0]]


def test_the_first_page_of_a_key_stays_the_one() -> None:
    books = Books(2)
    first, second = books.pool.take(2, PageUse.KV) or []
    books.prefix.publish(b"a", first)
    books.prefix.publish(b"a", second)
    books.prefix.give_back([first, second])
    assert books.prefix.match([b"a"]) == [first]
    assert books.pool.free == 1


def test_a_disabled_cache_keeps_nothing() -> None:
    pool = PagePool(1)
    prefix = PrefixCache(pool, count().__next__, enabled=False)
    pages = pool.take(1, PageUse.KV) or []
    prefix.publish(b"a", pages[0])
    prefix.give_back(pages)
    assert prefix.match([b"a"]) == []
    assert pool.free == 1


def test_pinned_adapters_stay_and_idle_ones_go_oldest_first() -> None:
    books = Books(3)
    residents = [books.residency.acquire(footprint(i)) for i in range(3)]
    assert books.residency.acquire(footprint(3)) is None
    for resident in residents[1:]:
        assert resident is not None
        books.residency.give_back(resident)
    assert books.residency.acquire(footprint(3)) is not None
    assert [books.residency.is_resident(i) for i in range(4)] == [True, False, True, True]


def test_the_least_recent_of_both_caches_goes_first() -> None:
    books = Books(2)
    resident = books.residency.acquire(footprint(0))
    (page,) = books.pool.take(1, PageUse.KV) or []
    assert resident is not None
    books.prefix.publish(b"a", page)
    books.residency.give_back(resident)
    books.prefix.give_back([page])
    assert books.pool.take(1, PageUse.KV) == resident.pages
    assert books.prefix.match([b"a"]) == [page]
    assert books.pool.taken_over[PageUse.KV] == 1


def test_idle_adapters_keep_no_more_than_their_share() -> None:
    books = Books(10, idle_pages=4)
    residents = [books.residency.acquire(footprint(i, pages=3)) for i in range(2)]
    for resident in residents:
        assert resident is not None
        books.residency.give_back(resident)
    assert [r.footprint.handle for r in books.residency.residents] == [1]


def test_an_adapter_evicted_before_it_was_published_is_not_published() -> None:
    books = Books(1)
    first = books.residency.acquire(footprint(0))
    assert first is not None
    books.residency.give_back(first)
    second = books.residency.acquire(footprint(1))
    assert books.residency.take_unpublished() == [second]
    assert books.residency.take_unpublished() == []


def test_without_descriptor_words_nothing_is_taken() -> None:
    books = Books(4, words=10)
    assert books.residency.acquire(footprint(0, words=8)) is not None
    assert books.residency.acquire(footprint(1, words=8)) is None
    assert books.pool.free == 3


@given(st.lists(st.integers(1, 9), min_size=1, max_size=30), st.randoms(use_true_random=False))
def test_descriptor_stretches_never_overlap_and_join_again(sizes, rng) -> None:
    space = DescriptorSpace(60)
    held: dict[int, int] = {}
    for size in sizes:
        if held and rng.random() < 0.4:
            start = rng.choice(list(held))
            space.give_back(start, held.pop(start))
        start = space.take(size)
        if start is None:
            continue
        assert all(start + size <= s or s + n <= start for s, n in held.items())
        assert 0 <= start <= 60 - size
        held[start] = size
    for start, size in held.items():
        space.give_back(start, size)
    assert space.take(60) == 0


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5)), max_size=60))
def test_any_order_of_events_leaves_the_books_sound(events) -> None:
    books = Books(7)
    sequences: list[list[int]] = []
    pinned: list[Resident] = []
    for kind, number in events:
        if kind == 0 and (pages := books.pool.take(number % 3 + 1, PageUse.KV)):
            sequences.append(pages)
        elif kind == 1 and sequences:
            books.prefix.give_back(sequences.pop(number % len(sequences)))
        elif kind == 2 and sequences:
            for i, page in enumerate(sequences[number % len(sequences)]):
                books.prefix.publish(bytes([number, i]), page)
        elif kind == 3 and (found := books.residency.acquire(footprint(number, number % 2 + 1))):
            pinned.append(found)
        elif kind == 4 and pinned:
            books.residency.give_back(pinned.pop(number % len(pinned)))
        matched = books.prefix.match([bytes([number, i]) for i in range(2)])
        books.prefix.give_back(matched)
        held: dict[int, int] = {}
        for owner in [*sequences, *(r.pages for r in books.residency.residents)]:
            for page in owner:
                held[page] = held.get(page, 0) + 1
        assert books.pool.check(held, books.prefix.idle_pages) == []


def dims(**sizes: int) -> ModelDims:
    defaults = {"layers": 3, "hidden": 64, "intermediate": 128, "heads": 6, "kv_heads": 3}
    return ModelDims(**{**defaults, "head_dim": 16, "vocab": 128, **sizes})


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_a_page_holds_the_heaviest_ranks_block_and_the_longest_row(world: int) -> None:
    model = dims()
    cuts = cut_model(model, world)
    small = PageLayout.choose(model, cuts, torch.float32, longest_row=512)
    large = PageLayout.choose(model, cuts, torch.float32, longest_row=100_000)
    assert small.block_tokens == 16
    assert large.page_bytes >= 100_000
    assert large.block_tokens % 16 == 0
    assert small.page_bytes % 128 == 0


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_key_and_value_views_tile_the_page_without_overlap(world: int) -> None:
    model = dims()
    cuts = cut_model(model, world)
    layout = PageLayout.choose(model, cuts, torch.float32, longest_row=0)
    for cut in cuts:
        arena = torch.zeros(3 * layout.page_bytes, dtype=torch.uint8)
        views = kv_views(arena, layout, model, cut)
        written = 0
        for keys, values in views:
            for view in (keys, values):
                assert view.shape[2:] == (16, 16)
                assert (view == 0).all(), "another view has written here"
                view[1] = 1.0
                written += view[1].numel() * 4
        pages = arena.view(3, -1)
        assert written <= layout.page_bytes
        assert not pages[0].any() and not pages[2].any()
