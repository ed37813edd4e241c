"""Paged attention: against its reference, against transformers' eager code, and its promises."""

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, eager_attention_forward

from kernels.attention import AttentionBatch, HeadNorms
from kernels.attention.gather import Geometry
from kernels.dispatch import Ops
from tests.kernels.paging import Pool, Tokens, deal_pages, fill, make_batch
from tests.kernels.truth import REFERENCE, assert_near, bits

BATCHES = {
    "one decode row": [(37, 1)],
    "first token": [(1, 1)],
    "whole blocks": [(32, 1), (32, 1)],
    "decode of like lengths": [(50, 1), (47, 1), (64, 1), (33, 1)],
    "decode of unlike lengths": [(200, 1), (1, 1), (16, 1), (17, 1), (90, 1)],
    "whole prompt": [(45, 45)],
    "chunk behind a cached prefix": [(45, 12)],
    "two rows": [(45, 2)],
    "mixed": [(20, 1), (33, 33), (70, 1), (64, 16), (31, 0), (5, 5), (21, 1)],
}


def run(
    ops: Ops,
    sequences: list[tuple[int, int]],
    pool: Pool,
    group: int,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """Return (the op's result, the reference's) on one random batch."""
    tokens = [Tokens.random(context, pool) for context, _ in sequences]
    tables = deal_pages([context for context, _ in sequences], pool)
    fill(pool, ops, tokens, tables)
    rows = sum(rows for _, rows in sequences)
    q = torch.randn(rows, pool.kv_heads * group, pool.dim).to(pool.dtype)
    results = [
        each.paged_attention(
            q,
            pool.k_cache,
            pool.v_cache,
            make_batch(sequences, tables, pool.block, extra_width=2),
            scale=pool.dim**-0.5,
            window=window,
        )
        for each in (ops, REFERENCE)
    ]
    return results[0], results[1]


@pytest.mark.parametrize("window", [None, 1, 15, 16, 17, 40, 1000])
@pytest.mark.parametrize("sequences", BATCHES.values(), ids=BATCHES)
def test_equals_reference(ops: Ops, sequences: list[tuple[int, int]], window: int | None) -> None:
    actual, expected = run(ops, sequences, Pool(pages=40, kv_heads=3, dim=64), 3, window)
    assert_near(actual, expected)


@pytest.mark.parametrize("group", range(1, 9))
@pytest.mark.parametrize(("kv_heads", "dim"), [(1, 16), (2, 80), (1, 256)])
def test_every_group_size_and_head_size(ops: Ops, group: int, kv_heads: int, dim: int) -> None:
    pool = Pool(pages=40, kv_heads=kv_heads, dim=dim)
    actual, expected = run(ops, BATCHES["mixed"], pool, group, None)
    assert_near(actual, expected)


@pytest.mark.parametrize("block", [1, 8, 24, 64, 128])
def test_every_block_size(ops: Ops, block: int) -> None:
    pool = Pool(pages=400, kv_heads=2, dim=32, block=block)
    actual, expected = run(ops, BATCHES["mixed"], pool, 2, 20)
    assert_near(actual, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bits(ops: Ops, dtype: torch.dtype) -> None:
    pool = Pool(pages=40, kv_heads=2, dim=32, dtype=dtype)
    actual, expected = run(ops, BATCHES["mixed"], pool, 3, None)
    assert_near(actual, expected)


@pytest.mark.parametrize("window", [None, 7])
def test_equals_transformers_eager_attention(ops: Ops, window: int | None) -> None:
    pool = Pool(pages=10, kv_heads=3, dim=64)
    tokens, tables = [Tokens.random(50, pool)], deal_pages([50], pool)
    fill(pool, ops, tokens, tables)
    q = torch.randn(50, 9, 64)
    layer = LlamaAttention(
        LlamaConfig(hidden_size=576, num_attention_heads=9, num_key_value_heads=3), 0
    ).eval()
    distance = torch.arange(50)[:, None] - torch.arange(50)[None]
    seen = (distance >= 0) & (distance < (window or 50))
    mask = torch.zeros(50, 50).masked_fill(~seen, torch.finfo(torch.float32).min)
    heads = [part.transpose(0, 1)[None] for part in (q, tokens[0].k, tokens[0].v)]
    expected, _ = eager_attention_forward(layer, *heads, mask[None, None], scaling=64**-0.5)
    batch = make_batch([(50, 50)], tables, 16)
    actual = ops.paged_attention(
        q, pool.k_cache, pool.v_cache, batch, scale=64**-0.5, window=window
    )
    assert_near(actual, expected[0])


@pytest.mark.parametrize("chunk", [1, 7, 16])
def test_chunks_over_a_cached_prefix_equal_one_shot(ops: Ops, chunk: int) -> None:
    pool = Pool(pages=10, kv_heads=2, dim=32)
    tokens, (table,) = Tokens.random(41, pool), deal_pages([41], pool)
    q = torch.randn(41, 6, 32)
    parts = []
    for start in range(0, 41, chunk):
        stop = min(start + chunk, 41)
        batch = make_batch([(stop, stop - start)], [table], 16)
        ops.store_kv(tokens.k[start:stop], tokens.v[start:stop], pool.k_cache, pool.v_cache, batch)
        parts.append(attend(ops, q[start:stop], pool, batch))
    whole = attend(ops, q, pool, make_batch([(41, 41)], [table], 16))
    assert_near(torch.cat(parts), whole)


def test_layers_of_one_step_share_a_batch(ops: Ops) -> None:
    """What is kept on the batch must not carry one layer's values into the next."""
    pool, other = Pool(pages=20, kv_heads=2, dim=32), Pool(pages=20, kv_heads=2, dim=32)
    sequences = [(20, 1), (33, 5), (30, 1)]
    tables = deal_pages([20, 33, 30], pool)
    for each in (pool, other):
        fill(each, ops, [Tokens.random(context, each) for context, _ in sequences], tables)
    q = torch.randn(7, 4, 32)
    batch = make_batch(sequences, tables, 16)
    for each, window in ((pool, None), (other, None), (pool, 5), (other, 20)):
        fresh = make_batch(sequences, tables, 16)
        expected = attend(REFERENCE, q, each, fresh, window)
        assert_near(attend(ops, q, each, batch, window), expected)


def test_nan_of_a_neighbour_stays_with_the_neighbour(ops: Ops) -> None:
    pool = Pool(pages=20, kv_heads=2, dim=32)
    tokens = [Tokens.random(count, pool) for count in (30, 40, 35)]
    tables = deal_pages([30, 40, 35], pool)
    fill(pool, ops, tokens, tables)
    q = torch.randn(3, 4, 32)
    sequences = [(30, 1), (40, 1), (35, 1)]
    clean = attend(ops, q, pool, make_batch(sequences, tables, 16))
    for cache in (pool.k_cache, pool.v_cache):
        cache[tables[1]] = float("nan")
    dirty = attend(ops, q, pool, make_batch(sequences, tables, 16))
    assert dirty[1].isnan().all()
    assert bits(dirty[[0, 2]]) == bits(clean[[0, 2]])


def test_pages_before_the_window_are_never_read(ops: Ops) -> None:
    pool = Pool(pages=20, kv_heads=2, dim=32)
    tokens, tables = (
        [Tokens.random(count, pool) for count in (100, 90)],
        deal_pages([100, 90], pool),
    )
    fill(pool, ops, tokens, tables)
    for table in tables:  # given back, and somebody else's since
        pool.k_cache[table[:4]] = float("nan")
        pool.v_cache[table[:4]] = float("nan")
    q = torch.randn(2, 4, 32)
    out = attend(ops, q, pool, make_batch([(100, 1), (90, 1)], tables, 16), 20)
    assert not out.isnan().any()


@pytest.mark.parametrize("rows", [1, 9, 40])
def test_store_writes_its_slots_and_nothing_else(ops: Ops, rows: int) -> None:
    pools = [Pool(pages=8, kv_heads=3, dim=16) for _ in range(2)]
    tables = deal_pages([60], pools[0])
    k, v = torch.randn(rows, 3, 16), torch.randn(rows, 3, 16)
    for each, pool in zip((ops, REFERENCE), pools, strict=True):
        batch = make_batch([(60, rows)], tables, 16)
        each.store_kv(k, v, pool.k_cache, pool.v_cache, batch)
    assert bits(pools[0].arena) == bits(pools[1].arena)
    assert int((~pools[0].arena.isnan()).sum()) == 2 * k.numel()


def test_store_takes_views_of_a_fused_projection(ops: Ops) -> None:
    pool = Pool(pages=8, kv_heads=2, dim=16)
    k, v = torch.randn(9, 100)[:, 4:68].split(32, dim=1)
    tables = deal_pages([9], pool)
    batch = make_batch([(9, 9)], tables, 16)
    ops.store_kv(k.view(9, 2, 16), v.view(9, 2, 16), pool.k_cache, pool.v_cache, batch)
    assert torch.equal(pool.k_cache[tables[0][0], :, :9].transpose(0, 1).flatten(1), k)


def test_places_beyond_int32_are_computed_in_int64() -> None:
    """40 pages of 2^27 elements: the last lies 20 GiB into an arena that is never touched."""
    stride, last = 1 << 27, 39
    geometry = Geometry(stride, 2, 4, 16)
    pages = torch.tensor([[last]], dtype=torch.int32).long()
    unit = geometry.unit(geometry.block)
    places = geometry.page_places(pages) * unit
    assert places.tolist() == [last * stride, last * stride + 4 * 16]
    slots = geometry.token_places(pages[0], torch.tensor([3])) * geometry.unit(1)
    assert slots.tolist() == [last * stride + 48, last * stride + 112]


def test_no_heads_and_no_rows_are_empty(ops: Ops) -> None:
    pool = Pool(pages=4, kv_heads=0, dim=16)
    batch = make_batch([(5, 5)], [[1]], 16)
    assert attend(ops, torch.empty(5, 0, 16), pool, batch).shape == (5, 0, 16)
    ops.store_kv(torch.empty(5, 0, 16), torch.empty(5, 0, 16), pool.k_cache, pool.v_cache, batch)
    pool = Pool(pages=4, kv_heads=2, dim=16)
    none = make_batch([], [], 16)
    assert attend(ops, torch.empty(0, 4, 16), pool, none).shape == (0, 4, 16)
    ops.store_kv(torch.empty(0, 2, 16), torch.empty(0, 2, 16), pool.k_cache, pool.v_cache, none)


def test_wrong_inputs_are_named(ops: Ops) -> None:
    pool = Pool(pages=4, kv_heads=2, dim=16)
    batch, q = make_batch([(5, 1)], [[1]], 16), torch.randn(1, 4, 16)
    for each in (ops, REFERENCE):
        with pytest.raises(ValueError, match="q must have a multiple of the 2 KV heads"):
            attend(each, torch.randn(1, 3, 16), pool, batch)
        with pytest.raises(ValueError, match="q must be"):
            attend(each, q.half(), pool, batch)
        with pytest.raises(ValueError, match="q must have 1 rows"):
            attend(each, torch.randn(2, 4, 16), pool, make_batch([(5, 1)], [[1]], 16))
        with pytest.raises(ValueError, match="window must be >= 1"):
            attend(each, q, pool, batch, 0)
        with pytest.raises(ValueError, match="k_cache must be"):
            each.paged_attention(q, pool.k_cache.mT, pool.v_cache, batch, scale=1.0, window=None)
        with pytest.raises(ValueError, match="v_cache must be"):
            each.paged_attention(q, pool.k_cache, pool.v_cache[1:], batch, scale=1.0, window=None)
        with pytest.raises(ValueError, match="k must be"):
            each.store_kv(torch.randn(2, 2, 16), q, pool.k_cache, pool.v_cache, batch)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("query_offsets", torch.zeros(3, dtype=torch.int32)),
        ("query_offsets", torch.zeros(4, dtype=torch.int32)[::2]),
        ("context_lens", torch.zeros(1)),
        ("page_table", torch.zeros(2, 4, dtype=torch.int32)),
        ("page_table", torch.zeros(1, 4, dtype=torch.int64)),
        ("write_slots", torch.zeros(2, dtype=torch.int32)),
    ],
)
def test_a_batch_that_does_not_fit_is_refused(field: str, value: Tensor) -> None:
    good = make_batch([(5, 1)], [[1]], 16)
    fields = {
        name: getattr(good, name) for name in AttentionBatch.__dataclass_fields__ if name != "memo"
    }
    with pytest.raises(ValueError, match=field):
        AttentionBatch(**{**fields, field: value})


def attend(
    ops: Ops, q: Tensor, pool: Pool, batch: AttentionBatch, window: int | None = None
) -> Tensor:
    return ops.paged_attention(
        q, pool.k_cache, pool.v_cache, batch, scale=pool.dim**-0.5, window=window
    )


@pytest.mark.parametrize("normed", [False, True])
def test_rotate_store_is_its_steps(ops: Ops, normed: bool) -> None:
    pools = [Pool(pages=8, kv_heads=3, dim=16) for _ in range(2)]
    tables = deal_pages([60, 30], pools[0])
    q, k, v = torch.randn(10, 15, 16).split([9, 3, 3], 1)
    cos_sin, positions = torch.randn(64, 16), torch.randint(0, 64, (10,))
    norms = HeadNorms(q=torch.randn(16), k=torch.randn(16), eps=1e-5) if normed else None
    batch = make_batch([(60, 1), (30, 9)], tables, 16)
    caches = [(pool.k_cache, pool.v_cache) for pool in pools]
    out = ops.rotate_store(q, k, v, *caches[0], cos_sin, positions, batch, norms=norms)
    if norms is not None:
        q, k = (ops.rms_norm(x, w, norms.eps) for x, w in ((q, norms.q), (k, norms.k)))
    expected, k = ops.rotary(q, k, cos_sin, positions)
    ops.store_kv(k, v, *caches[1], batch)
    assert bits(out) == bits(expected)
    assert bits(pools[0].arena) == bits(pools[1].arena)
