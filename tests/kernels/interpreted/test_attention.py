"""The Triton attention kernels against the reference, on memory that is NaN where unused."""

import math

import pytest
import torch
from torch import Tensor

from kernels.attention import AttentionBatch, HeadNorms, decode, gpu, prefill
from kernels.attention import reference as attention_reference
from kernels.attention.tiles import DecodeTile, Tile
from tests.kernels.paging import Pool, Tokens, deal_pages, fill, make_batch
from tests.kernels.truth import REFERENCE, assert_near, bits

ROTATE_STORE = (gpu.rotate_store, attention_reference.rotate_store)
MIXED = [(20, 1), (33, 33), (70, 1), (64, 16), (31, 0), (5, 5), (130, 1)]


def prepared(
    sequences: list[tuple[int, int]], pool: Pool, group: int
) -> tuple[Tensor, list[list[int]]]:
    """Return (queries, page tables) of sequences whose tokens are stored."""
    tables = deal_pages([context for context, _ in sequences], pool)
    fill(pool, REFERENCE, [Tokens.random(context, pool) for context, _ in sequences], tables)
    rows = sum(rows for _, rows in sequences)
    return torch.randn(rows, pool.kv_heads * group, pool.dim).to(pool.dtype), tables


def compare(
    sequences: list[tuple[int, int]], pool: Pool, group: int, window: int | None, decodes: int = 0
) -> None:
    q, tables = prepared(sequences, pool, group)
    batch = make_batch(sequences, tables, pool.block, extra_width=2)
    known = with_decodes(batch, decodes)
    case = {"scale": pool.dim**-0.5, "window": window}
    actual = gpu.paged_attention(q, pool.k_cache, pool.v_cache, known, **case)
    assert_near(actual, REFERENCE.paged_attention(q, pool.k_cache, pool.v_cache, batch, **case))


def with_decodes(batch: AttentionBatch, decodes: int, max_context: int = 0) -> AttentionBatch:
    names = ("query_offsets", "context_lens", "page_table", "write_pages", "write_slots")
    return AttentionBatch(
        **{name: getattr(batch, name) for name in names},
        max_query=batch.max_query,
        max_context=max(batch.max_context, max_context),
        decodes=decodes,
    )


@pytest.mark.parametrize("window", [None, 1, 16, 129])
def test_decode_around_block_and_split_edges(window: int | None) -> None:
    contexts = (1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 257, 300)
    compare([(c, 1) for c in contexts], Pool(pages=110, kv_heads=2, dim=16), 3, window)


@pytest.mark.parametrize("window", [None, 1, 15, 17, 40, 64, 1000])
@pytest.mark.parametrize("rows", [2, 17, 65])
def test_chunks_behind_a_prefix(rows: int, window: int | None) -> None:
    sequences = [(rows, rows), (rows + 63, rows), (rows + 130, rows)]
    compare(sequences, Pool(pages=60, kv_heads=1, dim=16), 2, window)


@pytest.mark.parametrize("window", [None, 20])
def test_mixed_steps(window: int | None) -> None:
    compare(MIXED, Pool(pages=40, kv_heads=2, dim=32), 3, window)


@pytest.mark.parametrize("decodes", [0, 1, 3])
def test_decode_rows_may_be_counted(decodes: int) -> None:
    sequences = [(20, 1), (7, 1), (300, 1), (40, 8), (31, 0), (33, 33), (1, 1)]
    compare(sequences, Pool(pages=60, kv_heads=2, dim=32), 2, None, decodes)


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("decodes", [0, 5, 80])
def test_a_step_may_have_room(decodes: int, window: int | None) -> None:
    """Sequences without rows behind those of one row and at the end, and rows of no sequence."""
    sequences = [(20, 1), (300, 1), (40, 8), (33, 33), (1, 1)]
    pool = Pool(pages=60, kv_heads=2, dim=32)
    q, tables = prepared(sequences, pool, 2)
    case = {"scale": 0.2, "window": window}
    caches = (pool.k_cache, pool.v_cache)
    expected = REFERENCE.paged_attention(
        q, *caches, make_batch(sequences, tables, pool.block), **case
    )
    gap = [(0, 0)] * (decodes - 2)
    with_gap = [*sequences[:2], *gap, *sequences[2:], (0, 0), (0, 0)]
    tables = [*tables[:2], *[[]] * len(gap), *tables[2:], [], []]
    batch = with_decodes(make_batch(with_gap, tables, pool.block), decodes, 900)
    rows = torch.cat([q, torch.full_like(q[:20], torch.nan)])
    actual = gpu.paged_attention(rows, *caches, batch, **case)
    assert_near(actual[: len(expected)], expected)


@pytest.mark.parametrize("group", [1, 2, 5, 7, 16, 17])
def test_every_group_size(group: int) -> None:
    compare([(150, 1), (20, 1)], Pool(pages=20, kv_heads=2, dim=16), group, None)
    compare([(50, 9), (20, 1)], Pool(pages=20, kv_heads=2, dim=16), group, None)


@pytest.mark.parametrize("dim", [8, 16, 64, 80, 128, 256])
def test_every_head_size(dim: int) -> None:
    compare([(150, 1), (20, 1)], Pool(pages=20, kv_heads=1, dim=dim), 2, None)
    compare([(50, 9), (20, 1)], Pool(pages=20, kv_heads=1, dim=dim), 2, 30)


@pytest.mark.parametrize("block", [1, 8, 24, 64, 128])
def test_every_block_size(block: int) -> None:
    pool = Pool(pages=300, kv_heads=2, dim=16, block=block)
    compare([(150, 1), (20, 1), (64, 1)], pool, 2, None)
    compare([(50, 9), (20, 1), (64, 1)], pool, 2, None)


def test_half_precision() -> None:
    for sequences in ([(300, 1), (17, 1)], [(60, 20), (17, 1)]):
        compare(sequences, Pool(pages=40, kv_heads=2, dim=64, dtype=torch.float16), 4, None)


def test_a_longer_bound_changes_no_bit() -> None:
    """A captured grid serves every shorter context, as long as its tile is the same."""
    pool = Pool(pages=60, kv_heads=2, dim=32)
    q, tables = prepared([(300, 1), (20, 1)], pool, 2)
    batch = make_batch([(300, 1), (20, 1)], tables, pool.block)
    outs = [
        gpu.paged_attention(
            q, pool.k_cache, pool.v_cache, with_decodes(batch, 0, bound), scale=0.2, window=None
        )
        for bound in (0, 1024)
    ]
    assert bits(outs[0]) == bits(outs[1])


def test_counters_are_zero_again() -> None:
    pool = Pool(pages=60, kv_heads=2, dim=32)
    q, tables = prepared([(300, 1), (20, 1)], pool, 2)
    batch = make_batch([(300, 1), (20, 1)], tables, pool.block)
    outs = [
        gpu.paged_attention(q, pool.k_cache, pool.v_cache, batch, scale=0.2, window=None)
        for _ in range(2)
    ]
    assert bits(outs[0]) == bits(outs[1])
    assert not decode.workspace(q.device, 2 * 32, 2)[2].any()


@pytest.mark.parametrize("window", [None, 90])
def test_splits_of_any_number_agree(window: int | None) -> None:
    pool = Pool(pages=60, kv_heads=2, dim=32)
    q, tables = prepared([(300, 1), (20, 1)], pool, 2)
    batch = make_batch([(300, 1), (20, 1)], tables, pool.block)
    caches = (pool.k_cache, pool.v_cache)
    expected = REFERENCE.paged_attention(q, *caches, batch, scale=1.0, window=window)
    for keys, min_split in ((16, 16), (16, 64), (64, 64)):
        tile = DecodeTile(keys=keys, warps=4, stages=3, min_split=min_split)
        for splits in (1, 2, 5, 30):
            out = torch.empty_like(q)
            decode.launch_decode(q, *caches, batch, out, math.log2(math.e), window, tile, splits)
            assert_near(out, expected)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize(("lines", "keys"), [(16, 64), (64, 16), (128, 64)])
def test_prefill_tiles_of_any_size_agree(lines: int, keys: int, window: int | None) -> None:
    pool = Pool(pages=40, kv_heads=2, dim=32)
    q, tables = prepared(MIXED, pool, 3)
    batch, caches = make_batch(MIXED, tables, pool.block), (pool.k_cache, pool.v_cache)
    expected = REFERENCE.paged_attention(q, *caches, batch, scale=1.0, window=window)
    tile, out = Tile(lines=lines, keys=keys, warps=4, stages=2), torch.full_like(q, float("nan"))
    prefill.launch_prefill(q, *caches, batch, out, math.log2(math.e), window, tile)
    assert_near(out, expected)


@pytest.mark.parametrize("window", [None, 20, 200])
def test_splits_of_a_chunk_agree(window: int | None) -> None:
    """Also splits that lie wholly behind some rows of a tile, or are not there for others."""
    sequences = [(600, 20), (300, 5), (700, 33), (40, 1)]
    pool = Pool(pages=110, kv_heads=2, dim=16)
    q, tables = prepared(sequences, pool, 2)
    batch, caches = make_batch(sequences, tables, pool.block), (pool.k_cache, pool.v_cache)
    expected = REFERENCE.paged_attention(q, *caches, batch, scale=1.0, window=window)
    tile = Tile(lines=32, keys=32, warps=4, stages=2)
    for splits in (1, 2, 8):
        out = torch.full_like(q, float("nan"))
        prefill.launch_prefill(q, *caches, batch, out, math.log2(math.e), window, tile, splits)
        assert_near(out, expected)
    assert not prefill.workspace(q.device, 32 * 16, 32)[2].any()


def test_few_rows_behind_a_long_prefix_are_split() -> None:
    pool = Pool(pages=140, kv_heads=2, dim=16)
    compare([(1500, 5), (600, 40)], pool, 2, None)
    assert not prefill.workspace(torch.device("cpu"), 128 * 16, 128)[2].any()


def test_pages_before_the_window_are_never_read() -> None:
    pool = Pool(pages=40, kv_heads=2, dim=32)
    q, tables = prepared([(100, 1), (290, 1), (90, 10)], pool, 2)
    for table in tables:
        for cache in (pool.k_cache, pool.v_cache):
            cache[table[:3]] = float("nan")
    for sequences, part in (([(100, 1), (290, 1)], slice(0, 2)), ([(90, 10)], slice(2, 12))):
        places = tables[:2] if part.start == 0 else tables[2:]
        batch = make_batch(sequences, places, 16)
        out = gpu.paged_attention(q[part], pool.k_cache, pool.v_cache, batch, scale=0.2, window=20)
        assert not out.isnan().any()


def test_queries_may_be_strided_and_heads_absent() -> None:
    pool = Pool(pages=10, kv_heads=2, dim=32)
    q, tables = prepared([(40, 1), (30, 1)], pool, 2)
    wide = torch.full((2, 9, 32), float("nan"))
    wide[:, 3:7] = q
    batch = make_batch([(40, 1), (30, 1)], tables, 16)
    case = {"scale": 0.2, "window": None}
    expected = gpu.paged_attention(q, pool.k_cache, pool.v_cache, batch, **case)
    actual = gpu.paged_attention(wide[:, 3:7], pool.k_cache, pool.v_cache, batch, **case)
    assert bits(actual) == bits(expected)
    none = gpu.paged_attention(q[:, :0], pool.k_cache, pool.v_cache, batch, **case)
    assert none.shape == (2, 0, 32)


def padded_batch(pool: Pool) -> AttentionBatch:
    """Two sequences, and two of padding."""
    tables = deal_pages([40, 30], pool)
    batch = make_batch([(40, 1), (30, 1)], tables, 16)
    return AttentionBatch(
        query_offsets=torch.arange(5, dtype=torch.int32),
        context_lens=torch.tensor([40, 30, 0, 0], dtype=torch.int32),
        page_table=torch.cat((batch.page_table, torch.zeros_like(batch.page_table))),
        write_pages=torch.cat((batch.write_pages, torch.full((2,), -1, dtype=torch.int32))),
        write_slots=torch.cat((batch.write_slots, torch.zeros(2, dtype=torch.int32))),
        max_query=1,
        max_context=256,
    )


def test_padding_stores_nothing_and_is_finite() -> None:
    pools = [Pool(pages=10, kv_heads=2, dim=32) for _ in range(2)]
    k, v, q = torch.randn(4, 2, 32), torch.randn(4, 2, 32), torch.randn(4, 4, 32)
    before = [Tokens.random(count, pools[0]) for count in (39, 29)]
    for pool in pools:
        fill(pool, REFERENCE, before, deal_pages([40, 30], pool))
    for store, pool in zip((gpu.store_kv, REFERENCE.store_kv), pools, strict=True):
        store(k, v, pool.k_cache, pool.v_cache, padded_batch(pool))
    assert bits(pools[0].arena) == bits(pools[1].arena)
    caches = (pools[0].k_cache, pools[0].v_cache)
    out = gpu.paged_attention(q, *caches, padded_batch(pools[0]), scale=0.2, window=None)
    assert not out[2:].any()


@pytest.mark.parametrize(("rows", "heads", "dim"), [(1, 1, 16), (9, 3, 80), (40, 9, 32)])
def test_store_writes_its_slots_and_nothing_else(rows: int, heads: int, dim: int) -> None:
    pools = [Pool(pages=8, kv_heads=heads, dim=dim) for _ in range(2)]
    tables = deal_pages([60], pools[0])
    both = torch.randn(rows, 2 * heads, dim)
    k, v = both.split(heads, 1)
    for store, pool in zip((gpu.store_kv, REFERENCE.store_kv), pools, strict=True):
        store(k, v, pool.k_cache, pool.v_cache, make_batch([(60, rows)], tables, 16))
    assert bits(pools[0].arena) == bits(pools[1].arena)
    assert int((~pools[0].arena.isnan()).sum()) == 2 * k.numel()


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("heads", "dim"), [((9, 3), 16), ((1, 1), 80), ((28, 4), 32)])
def test_rotate_store_equals_its_steps(
    heads: tuple[int, int], dim: int, dtype: torch.dtype, normed: bool
) -> None:
    q_heads, kv_heads = heads
    pools = [Pool(pages=8, kv_heads=kv_heads, dim=dim, dtype=dtype) for _ in range(2)]
    tables = deal_pages([60, 30], pools[0])
    sequences = [(60, 1), (30, 9)]
    sizes = [q_heads, kv_heads, kv_heads]
    q, k, v = torch.randn(10, sum(sizes), dim).to(dtype).split(sizes, 1)
    cos_sin, positions = torch.randn(64, dim), torch.randint(0, 64, (10,))
    norms = HeadNorms(q=torch.randn(dim).to(dtype), k=torch.randn(dim).to(dtype), eps=1e-5)
    outs = [
        op(
            *(q, k, v, pool.k_cache, pool.v_cache, cos_sin, positions),
            make_batch(sequences, tables, 16),
            norms=norms if normed else None,
        )
        for op, pool in zip(ROTATE_STORE, pools, strict=True)
    ]
    assert_near(*outs)
    for name in ("k_cache", "v_cache"):
        got, expected = (getattr(pool, name) for pool in pools)
        assert torch.equal(got.isnan(), expected.isnan())
        assert_near(got.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("window", [None, 1, 90])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("group", "dim"), [(3, 16), (1, 80), (4, 128)])
def test_rotate_attend_equals_its_steps(
    group: int, dim: int, normed: bool, window: int | None
) -> None:
    """Rows that start a context, a page, a block of keys or a split, in one launch."""
    contexts = [1, 2, 16, 17, 64, 65, 129, 257, 258, 600]
    pools, outs = rotated_and_attended([(c, 1) for c in contexts], group, dim, normed, window)
    assert_near(*outs)
    for name in ("k_cache", "v_cache"):
        got, expected = (getattr(pool, name) for pool in pools)
        assert torch.equal(got.isnan(), expected.isnan())
        assert_near(got.nan_to_num(), expected.nan_to_num())


def rotated_and_attended(
    sequences: list[tuple[int, int]], group: int, dim: int, normed: bool, window: int | None
) -> tuple[list[Pool], list[Tensor]]:
    """The pools and the results of the op under test and of the reference."""
    contexts, rows = [c for c, _ in sequences], sum(n for _, n in sequences)
    pools = [Pool(pages=110, kv_heads=2, dim=dim) for _ in range(2)]
    tables = deal_pages(contexts, pools[0])
    before = [Tokens.random(context - count, pools[0]) for context, count in sequences]
    q, k, v = torch.randn(rows, 2 * group + 4, dim).split([2 * group, 2, 2], 1)
    cos_sin, positions = torch.randn(64, dim), torch.randint(0, 64, (rows,))
    norms = HeadNorms(q=torch.randn(dim), k=torch.randn(dim), eps=1e-5)
    outs = []
    for op, pool in zip((gpu.rotate_attend, REFERENCE.rotate_attend), pools, strict=True):
        fill(pool, REFERENCE, before, tables)
        outs.append(
            op(
                *(q, k, v, pool.k_cache, pool.v_cache, cos_sin, positions),
                make_batch(sequences, tables, pool.block),
                norms=norms if normed else None,
                scale=dim**-0.5,
                window=window,
            )
        )
    return pools, outs


def test_rotate_attend_takes_chunks_too() -> None:
    pools, outs = rotated_and_attended([(40, 1), (70, 9), (5, 5)], 2, 16, False, None)
    assert_near(*outs)
    assert torch.equal(pools[0].arena.isnan(), pools[1].arena.isnan())


def test_rotate_attend_stores_nothing_for_padding() -> None:
    pools = [Pool(pages=10, kv_heads=2, dim=32) for _ in range(2)]
    batch, (k, v), q = padded_batch(pools[0]), torch.randn(2, 4, 2, 32), torch.randn(4, 4, 32)
    cos_sin, positions = torch.randn(64, 32), torch.tensor([39, 29, 0, 0])
    for pool in pools:
        fill(
            pool, REFERENCE, [Tokens.random(n, pool) for n in (39, 29)], deal_pages([40, 30], pool)
        )
    outs = [
        op(
            *(q, k, v, pool.k_cache, pool.v_cache, cos_sin, positions, batch),
            norms=None, scale=0.2, window=None,
        )
        for op, pool in zip((gpu.rotate_attend, REFERENCE.rotate_attend), pools, strict=True)
    ]  # fmt: skip
    assert torch.equal(pools[0].arena.isnan(), pools[1].arena.isnan())
    assert outs[0].isfinite().all()


def test_wrong_inputs_are_named() -> None:
    pool = Pool(pages=10, kv_heads=2, dim=32)
    q, tables = prepared([(40, 1)], pool, 2)
    batch = make_batch([(40, 1)], tables, 16)
    caches = (pool.k_cache, pool.v_cache)
    with pytest.raises(ValueError, match="scale must be"):
        gpu.paged_attention(q, *caches, batch, scale=0.0, window=None)
    with pytest.raises(ValueError, match="window must be"):
        gpu.paged_attention(q, *caches, batch, scale=1.0, window=0)
    with pytest.raises(ValueError, match="q must be"):
        gpu.paged_attention(q.half(), *caches, batch, scale=1.0, window=None)
    with pytest.raises(ValueError, match="decodes must be"):
        with_decodes(batch, 2)
