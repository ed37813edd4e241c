"""Pages, the prefix cache and adapter residency keep sound books in any order of events."""

from __future__ import annotations

import math
from itertools import count

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sharding import ModelDims, cut_model
from tp_engine.memory import (
    AdapterFootprint,
    AdapterResidency,
    Demand,
    HostTier,
    PageLayout,
    PagePool,
    PageUse,
    PrefixCache,
    Prices,
    Resident,
    block_key,
    kv_views,
    root_key,
)
from tp_engine.memory.descriptors import DescriptorSpace
from tp_engine.memory.worth import LIFETIME, UNUSED, count_use


def footprint(handle: int, pages: int = 1, words: int = 8) -> AdapterFootprint:
    return AdapterFootprint(
        handle=handle, digest=str(handle), name=str(handle), pages=pages, words=words, max_rank=4
    )


class Books:
    """A pool with both caches, as the engine puts them together; every look at the clock is a
    second later."""

    def __init__(self, pages: int, words: int = 1000, idle_pages: int = 1000) -> None:
        self.clock = count().__next__
        self.pool = PagePool(pages)
        self.prices = Prices(page_bytes=1024, block_tokens=4)
        self.demand = Demand(self.clock)
        self.prefix = PrefixCache(self.pool, self.prices, self.clock)
        self.cold: set[int] = set()
        self.residency = AdapterResidency(
            self.pool,
            self.demand,
            self.prices,
            descriptor_words=words,
            idle_pages=idle_pages,
            is_warm=lambda handle: handle not in self.cold,
        )

    def use(self, adapter: AdapterFootprint) -> Resident | None:
        """What a request that is admitted does, with the load before it."""
        self.demand.refer(adapter.handle)
        if self.residency.find(adapter.handle) is None and self.residency.load(adapter):
            self.residency.landed(adapter.handle)
        if resident := self.residency.acquire(adapter):
            self.demand.use(adapter.handle)
        self.demand.let_go(adapter.handle)
        return resident

    def use_once(self, adapter: AdapterFootprint) -> None:
        """A whole request."""
        resident = self.use(adapter)
        assert resident is not None
        self.residency.give_back(resident)


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


def test_pages_that_were_only_looked_at_are_worth_no_more() -> None:
    books = Books(2)
    pages = books.pool.take(2, PageUse.KV) or []
    for key, page in zip((b"a", b"b"), pages, strict=True):
        books.prefix.publish(key, page)
        books.prefix.give_back([page])
    for _ in range(5):
        assert books.prefix.find([b"a", b"?"]) == pages[:1]
        assert books.prefix.idle_among(pages) == 2
    assert books.pool.take(1, PageUse.KV) == pages[:1], "the one that was used before the other"


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
    prices = Prices(page_bytes=1024, block_tokens=4)
    prefix = PrefixCache(pool, prices, count().__next__, enabled=False)
    pages = pool.take(1, PageUse.KV) or []
    prefix.publish(b"a", pages[0])
    prefix.give_back(pages)
    assert prefix.match([b"a"]) == []
    assert pool.free == 1


def test_pinned_adapters_stay_and_idle_ones_go_oldest_first() -> None:
    books = Books(3)
    residents = [books.use(footprint(i)) for i in range(3)]
    assert books.use(footprint(3)) is None
    for resident in residents[1:]:
        assert resident is not None
        books.residency.give_back(resident)
    assert books.use(footprint(3)) is not None
    assert [books.residency.is_resident(i) for i in range(4)] == [True, False, True, True]


@pytest.mark.parametrize("adapter_is_cheaper", [True, False])
def test_what_is_worth_least_in_either_cache_goes_first(adapter_is_cheaper: bool) -> None:
    books = Books(2)
    books.prices.kv = 1.0 if adapter_is_cheaper else 1e-9
    books.use_once(footprint(0))
    (page,) = books.pool.take(1, PageUse.KV) or []
    books.prefix.publish(b"a", page)
    books.prefix.give_back([page])
    taken = books.pool.take(1, PageUse.KV) or []
    assert (taken == [page]) == (not adapter_is_cheaper)
    assert books.residency.is_resident(0) == (not adapter_is_cheaper)
    assert books.pool.taken_over[PageUse.KV] == adapter_is_cheaper


def test_a_hot_small_adapter_survives_a_scan_of_cold_ones() -> None:
    books = Books(10)
    hot = footprint(0)
    for _ in range(5):
        books.use_once(hot)
    for number in range(1, 200):
        books.use_once(footprint(number, pages=3))
        assert books.residency.is_resident(0), number
    assert books.residency.evictions == 199 - 3


def test_a_use_of_long_ago_counts_less_than_one_of_now() -> None:
    books = Books(2)
    for _ in range(5):
        books.use_once(footprint(0))
    for _ in range(int(4 * LIFETIME)):
        books.clock()
    books.use_once(footprint(1))
    books.use_once(footprint(2))
    assert not books.residency.is_resident(0)


def test_of_two_alike_the_one_without_a_host_copy_stays() -> None:
    books = Books(2)
    books.cold.add(0)
    for number in range(3):
        books.use_once(footprint(number))
    assert [books.residency.is_resident(i) for i in range(3)] == [True, False, True]


def test_an_adapter_that_a_queued_request_wants_goes_last_but_goes() -> None:
    books = Books(3)
    for number in range(3):
        books.use_once(footprint(number))
    books.demand.refer(0)
    books.use_once(footprint(3))
    books.use_once(footprint(4))
    assert books.residency.is_resident(0)
    assert books.pool.take(3, PageUse.KV) is not None
    assert not books.residency.is_resident(0)


def test_an_adapter_on_its_way_is_neither_used_nor_evicted() -> None:
    books = Books(3)
    assert books.residency.load(footprint(0, pages=2)) is not None
    assert books.residency.acquire(footprint(0, pages=2)) is None
    assert not books.residency.is_resident(0)
    assert books.pool.take(2, PageUse.KV) is None
    books.residency.landed(0)
    assert books.pool.take(2, PageUse.KV) is not None


def test_a_load_leaves_pages_to_spare() -> None:
    books = Books(4)
    assert books.residency.load(footprint(0, pages=3), spare=2) is None
    assert books.residency.load(footprint(0, pages=3), spare=1) is not None


def test_idle_adapters_keep_no_more_than_their_share() -> None:
    books = Books(10, idle_pages=4)
    for number in range(2):
        books.use_once(footprint(number, pages=3))
    assert [r.footprint.handle for r in books.residency.residents] == [1]


def test_what_queued_requests_want_does_not_count_as_idle() -> None:
    books = Books(10, idle_pages=4)
    books.demand.refer(0)
    for number in range(3):
        books.use_once(footprint(number, pages=3))
    assert [r.footprint.handle for r in books.residency.residents] == [0, 2]
    books.demand.let_go(0)
    assert len(books.residency.residents) == 1


def test_without_descriptor_words_nothing_is_taken() -> None:
    books = Books(4, words=10)
    assert books.use(footprint(0, words=8)) is not None
    assert books.use(footprint(1, words=8)) is None
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


@settings(max_examples=100)
@given(
    st.lists(st.tuples(st.integers(0, 7), st.integers(0, 5)), max_size=60),
    st.sampled_from([0, 2, 1000]),
)
def test_any_order_of_events_leaves_the_books_sound(events, idle_pages) -> None:
    books = Books(7, words=40, idle_pages=idle_pages)
    sequences: list[list[int]] = []
    pinned: list[Resident] = []
    coming: list[int] = []
    asked: list[int] = []
    for kind, number in events:
        adapter = footprint(number, number % 2 + 1)
        if kind == 0 and (pages := books.pool.take(number % 3 + 1, PageUse.KV)):
            sequences.append(pages)
        elif kind == 1 and sequences:
            books.prefix.give_back(sequences.pop(number % len(sequences)))
        elif kind == 2 and sequences:
            for i, page in enumerate(sequences[number % len(sequences)]):
                books.prefix.publish(bytes([number, i]), page)
        elif kind == 3 and books.residency.find(number) is None:
            if books.residency.load(adapter, spare=number % 2):
                coming.append(number)
        elif kind == 3 and (found := books.residency.acquire(adapter)):
            books.demand.use(number)
            pinned.append(found)
        elif kind == 4 and pinned:
            books.residency.give_back(pinned.pop(number % len(pinned)))
        elif kind == 5 and coming:
            books.residency.landed(coming.pop(number % len(coming)))
        elif kind == 6:
            books.demand.refer(number)
            asked.append(number)
        elif kind == 7 and asked:
            books.demand.let_go(asked.pop(number % len(asked)))
        matched = books.prefix.match([bytes([number, i]) for i in range(2)])
        books.prefix.give_back(matched)
        check_books(books, sequences, pinned, coming)
    assert idle_pages >= sum(
        len(r.pages)
        for r in books.residency.residents
        if r.ready and not r.users and not books.demand.is_wanted(r.footprint.handle)
    )


def check_books(
    books: Books, sequences: list[list[int]], pinned: list[Resident], coming: list[int]
) -> None:
    held: dict[int, int] = {}
    for owner in [*sequences, *(r.pages for r in books.residency.residents)]:
        for page in owner:
            held[page] = held.get(page, 0) + 1
    assert books.pool.check(held, books.prefix.idle_pages) == []
    residents = books.residency.residents
    assert all(any(r is kept for kept in residents) for r in pinned), "a pinned one has gone"
    assert sorted(r.footprint.handle for r in residents if not r.ready) == sorted(coming)
    idle = [r for r in residents if r.ready and r.users == 0]
    assert books.residency.evictable() == sum(len(r.pages) for r in idle)


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 5)), max_size=60))
def test_host_pages_are_never_lost_nor_taken_from_what_is_wanted(events) -> None:
    demand, gone = Demand(count().__next__), []
    host = HostTier(7, demand, Prices(page_bytes=1024, block_tokens=4), gone.append)
    references: list[int] = []
    holds: list[int] = []
    there: set[int] = set()
    for kind, number in events:
        if kind == 0 and not host.is_warm(number) and not host.is_coming(number):
            gone.clear()
            before = {handle for handle in there if not demand.is_wanted(handle)}
            if host.take(footprint(number, pages=number % 3 + 1)) is not None:
                there -= set(gone)
                assert set(gone) <= before
            else:
                assert gone == []
        elif kind == 1 and host.is_coming(number):
            host.arrived(number)
            there.add(number)
        elif kind == 2:
            demand.refer(number)
            references.append(number)
        elif kind == 3 and references:
            demand.let_go(references.pop(number % len(references)))
        elif kind == 4:
            demand.hold(number)
            holds.append(number)
        elif kind == 5 and holds:
            demand.release(holds.pop(number % len(holds)))
        elif kind == 6:
            demand.use(number)
        assert host.check() == []
        assert all(host.is_warm(handle) for handle in there)


def test_the_copy_that_is_worth_least_leaves_the_host_first() -> None:
    demand, gone = Demand(count().__next__), []
    host = HostTier(3, demand, Prices(page_bytes=1024, block_tokens=4), gone.append)
    for number in range(3):
        assert host.take(footprint(number)) is not None
        host.arrived(number)
    for number in (0, 2, 0, 1, 2):
        demand.refer(number)
        demand.use(number)
        demand.let_go(number)
    assert host.take(footprint(3, pages=2)) is not None
    assert gone == [1, 0]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3000)), min_size=1, max_size=40))
def test_the_weight_of_uses_is_their_faded_number(uses) -> None:
    uses.sort(key=lambda use: use[1])
    weights = [UNUSED] * 10
    for key, now in uses:
        weights[key] = count_use(weights[key], now)
    last = uses[-1][1]
    for key, weight in enumerate(weights):
        faded = sum(math.exp((at - last) / LIFETIME) for k, at in uses if k == key)
        assert math.exp(weight - last / LIFETIME) == pytest.approx(faded)


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
