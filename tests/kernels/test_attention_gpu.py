"""Paged attention and the small ops on a GPU, in all dtypes, eager and replayed."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.attention import AttentionBatch, HeadNorms
from kernels.attention import reference as attention_reference
from kernels.fused import reference as fused_reference
from tests.kernels.paging import Pool, Tokens, deal_pages, fill, make_batch
from tests.kernels.truth import REFERENCE, assert_near

pytest.importorskip("triton")

from kernels.attention import gpu as attention
from kernels.attention import hopper
from kernels.attention.tiles import HopperTile
from kernels.fused import gpu as fused

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
DECODE = [(1, 1), (16, 1), (17, 1), (128, 1), (129, 1), (1000, 1), (5000, 1)]
MIXED = [(20, 1), (700, 1), (31, 0), (333, 333), (640, 160), (31, 0), (5, 5), (1300, 1)]
SINGLES = 3
"""Of MIXED, the first sequences of at most one row."""


def on_device(pool: Pool) -> tuple[Tensor, Tensor]:
    arena = pool.arena.cuda()
    k, v = (
        arena.as_strided(cache.shape, cache.stride(), cache.storage_offset())
        for cache in (pool.k_cache, pool.v_cache)
    )
    return k, v


def moved(batch: AttentionBatch, **changed: int) -> AttentionBatch:
    fields = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch) if f.init}
    tensors = {name: value.cuda() for name, value in fields.items() if isinstance(value, Tensor)}
    return AttentionBatch(**{**fields, **tensors, **changed})


def prepared(
    sequences: list[tuple[int, int]], pool: Pool, group: int
) -> tuple[Tensor, AttentionBatch]:
    contexts = [context for context, _ in sequences]
    tables = deal_pages(contexts, pool)
    fill(pool, REFERENCE, [Tokens.random(context, pool) for context in contexts], tables)
    rows = sum(rows for _, rows in sequences)
    q = torch.randn(rows, pool.kv_heads * group, pool.dim).to(pool.dtype)
    return q, make_batch(sequences, tables, pool.block, extra_width=2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 1, 100, 1000])
@pytest.mark.parametrize(("group", "dim"), [(1, 16), (4, 64), (4, 128), (7, 80), (2, 256)])
@pytest.mark.parametrize("sequences", [DECODE, MIXED], ids=["decode", "mixed"])
def test_equals_reference(
    sequences: list[tuple[int, int]],
    group: int,
    dim: int,
    window: int | None,
    dtype: torch.dtype,
) -> None:
    pool = Pool(pages=500, kv_heads=2, dim=dim, dtype=dtype)
    q, batch = prepared(sequences, pool, group)
    case = {"scale": dim**-0.5, "window": window}
    expected = REFERENCE.paged_attention(q, pool.k_cache, pool.v_cache, batch, **case)
    for decodes in (0, SINGLES):
        known = moved(batch, decodes=decodes)
        actual = attention.paged_attention(q.cuda(), *on_device(pool), known, **case)
        if dtype == torch.float32:  # sums of thousands of products in another order
            torch.testing.assert_close(actual.cpu(), expected, rtol=1e-4, atol=1e-5)
        else:
            assert_near(actual.cpu(), expected)


@pytest.mark.parametrize(
    ("dtype", "group", "dim", "page", "keys", "each"),
    [
        (torch.bfloat16, 4, 128, 16, 128, 1),
        (torch.bfloat16, 4, 128, 16, 64, 3),
        (torch.float16, 3, 128, 8, 128, 3),
        (torch.bfloat16, 16, 128, 64, 128, 1),
        (torch.bfloat16, 1, 64, 16, 128, 1),
        (torch.bfloat16, 7, 64, 32, 64, 3),
    ],
)
def test_hopper_equals_reference(
    dtype: torch.dtype, group: int, dim: int, page: int, keys: int, each: int
) -> None:
    """All memory but the contexts is NaN, also behind the last token of a page."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper device")
    sequences = [*MIXED, (129, 128), (64, 64), (2000, 3)]
    pool = Pool(pages=700, kv_heads=2, dim=dim, block=page, dtype=dtype, gap=dim)
    q, batch = prepared(sequences, pool, group)
    behind = torch.cat([torch.full((r,), i >= SINGLES) for i, (_, r) in enumerate(sequences)])
    caches = on_device(pool)
    assert hopper.fits_hopper(q.cuda(), *caches) == (dim == 128)
    tile, scale = HopperTile(keys=keys, stages=2, each=each), dim**-0.5
    for window, decodes in ((None, SINGLES), (1, 0), (100, 0), (1000, 0)):
        out = torch.full_like(q, float("nan"), device="cuda")
        known = moved(batch, decodes=decodes)
        hopper.launch_hopper(q.cuda(), *caches, known, out, scale * attention.LOG2_E, window, tile)
        expected = REFERENCE.paged_attention(
            q, pool.k_cache, pool.v_cache, batch, scale=scale, window=window
        )
        written = behind if decodes else torch.ones_like(behind)
        assert_near(out.cpu()[written], expected[written])
        assert out.cpu()[~written].isnan().all()


def replayed(run: Callable[[], Tensor]) -> tuple[Tensor, torch.cuda.CUDAGraph]:
    """Return (the output of a graph, the graph), run once before it was captured."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    return out, graph


def test_one_graph_serves_all_contexts_bit_for_bit() -> None:
    pool = Pool(pages=500, kv_heads=2, dim=128, dtype=torch.bfloat16)
    q, batch = prepared(DECODE, pool, 4)
    caches, q = on_device(pool), q.cuda()
    known = moved(batch, max_context=8192)

    def attend() -> Tensor:
        return attention.paged_attention(q, *caches, known, scale=0.1, window=None)

    out, graph = replayed(attend)
    whole = known.context_lens.clone()
    for limit in (5000, 1, 128, 129, 2000, 5000):
        known.context_lens.copy_(whole.clamp(max=limit))
        graph.replay()
        assert torch.equal(out, attend())
    expected = REFERENCE.paged_attention(
        q.cpu(), pool.k_cache, pool.v_cache, batch, scale=0.1, window=None
    )
    assert_near(out.cpu(), expected)


def test_runs_are_equal_bit_for_bit() -> None:
    """The last program of a row to finish is another one each time; the order of sums is not."""
    pool = Pool(pages=500, kv_heads=2, dim=128, dtype=torch.bfloat16)
    q, batch = prepared(DECODE, pool, 4)
    caches, q, known = on_device(pool), q.cuda(), moved(batch)
    runs = [
        attention.paged_attention(q, *caches, known, scale=0.1, window=None) for _ in range(200)
    ]
    assert all(torch.equal(runs[0], run) for run in runs)


def test_a_page_beyond_4_gib_is_found() -> None:
    stride, pages = 2**20, 2**12 + 8  # elements of 2 bytes: 8 GiB
    arena = torch.empty(stride * pages, dtype=torch.bfloat16, device="cuda")
    shape, strides = (pages, 1, 16, 64), (stride, 16 * 64, 64, 1)
    caches = arena.as_strided(shape, strides), arena.as_strided(shape, strides, 16 * 64)
    sequences = [(20, 1), (20, 20)]
    batch = moved(make_batch(sequences, [[pages - 1, pages - 3], [pages - 2, 0]], 16))
    k, v, q = (torch.randn(21, heads, 64, device="cuda").bfloat16() for heads in (1, 1, 4))
    for cache in caches:
        cache[pages - 1] = 1.0
    attention.store_kv(k, v, *caches, batch)
    case = {"scale": 0.1, "window": None}
    actual = attention.paged_attention(q, *caches, batch, **case)
    assert_near(actual, attention_reference.paged_attention(q, *caches, batch, **case))


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rotate_store(dtype: torch.dtype, normed: bool) -> None:
    pools = [Pool(pages=8, kv_heads=3, dim=80, dtype=dtype) for _ in range(2)]
    tables = deal_pages([60, 30], pools[0])
    q, k, v = torch.randn(10, 15, 80).to(dtype).cuda().split([9, 3, 3], 1)
    table = torch.randn(64, 80, device="cuda")
    positions = torch.randint(0, 64, (10,), device="cuda")
    norms = HeadNorms(q=table[0].to(dtype), k=table[1].to(dtype), eps=1e-5) if normed else None
    results = []
    for op, pool in zip(
        (attention.rotate_store, attention_reference.rotate_store), pools, strict=True
    ):
        caches = on_device(pool)
        batch = moved(make_batch([(60, 1), (30, 9)], tables, 16))
        out = op(q, k, v, *caches, table, positions, batch, norms=norms)
        results.append((out, *caches))
    for got, expected in zip(*results, strict=True):
        assert torch.equal(got.isnan(), expected.isnan())
        assert_near(got.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(
    ("dtype", "group", "dim", "normed"),
    [
        (torch.bfloat16, 4, 64, False),
        (torch.bfloat16, 4, 128, True),
        (torch.bfloat16, 7, 80, False),
        (torch.bfloat16, 2, 256, True),
        (torch.float16, 4, 128, False),
        (torch.float32, 7, 80, True),
    ],
)
@pytest.mark.parametrize("sequences", [DECODE, MIXED], ids=["decode", "mixed"])
def test_rotate_attend(
    sequences: list[tuple[int, int]],
    group: int,
    dim: int,
    normed: bool,
    window: int | None,
    dtype: torch.dtype,
) -> None:
    """In one launch, or with its steps for longer sequences; replayed."""
    pool = Pool(pages=500, kv_heads=2, dim=dim, dtype=dtype)
    tables = deal_pages([context for context, _ in sequences], pool)
    before = [Tokens.random(context - rows, pool) for context, rows in sequences]
    fill(pool, REFERENCE, before, tables)
    batch = make_batch(sequences, tables, pool.block)
    rows = sum(rows for _, rows in sequences)
    sizes = [2 * group, 2, 2]
    heads = torch.randn(rows, sum(sizes), dim).to(dtype)
    cos_sin, positions = torch.randn(64, dim), torch.randint(0, 64, (rows,))
    q_norm, k_norm = torch.randn(2, dim).to(dtype)
    norms = HeadNorms(q=q_norm, k=k_norm, eps=1e-5) if normed else None
    cuda_norms = HeadNorms(q=q_norm.cuda(), k=k_norm.cuda(), eps=1e-5) if normed else None
    caches, case = on_device(pool), {"scale": dim**-0.5, "window": window}
    expected = REFERENCE.rotate_attend(
        *(*heads.split(sizes, 1), pool.k_cache, pool.v_cache, cos_sin, positions, batch),
        **case,
        norms=norms,
    )
    arguments = (*heads.cuda().split(sizes, 1), *caches, cos_sin.cuda(), positions.cuda())
    known = moved(batch, decodes=SINGLES)
    actual, graph = replayed(
        lambda: attention.rotate_attend(*arguments, known, **case, norms=cuda_norms)
    )
    actual.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    near = 1e-4 if dtype == torch.float32 else 1.6e-2
    for got, want in zip((actual, *caches), (expected, pool.k_cache, pool.v_cache), strict=True):
        assert torch.equal(got.isnan().cpu(), want.isnan())
        difference = got.cpu().nan_to_num().float() - want.nan_to_num().float()
        assert float(difference.abs().max()) <= near * float(want.nan_to_num().abs().max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 33])
def test_small_ops(rows: int, dtype: torch.dtype) -> None:
    x, residual = (torch.randn(rows, 4096, device="cuda").to(dtype) for _ in range(2))
    weight = torch.randn(4096, device="cuda").to(dtype)
    q, k = torch.randn(rows, 40, 128, device="cuda").to(dtype).split([32, 8], 1)
    table = torch.randn(64, 128, device="cuda")
    positions = torch.randint(0, 64, (rows,), device="cuda")
    for name, arguments in {
        "rms_norm": (x, weight, 1e-5),
        "add_rms_norm": (x, residual, weight, 1e-5),
        "silu_mul": (x,),
        "rotary": (q, k, table, positions),
    }.items():
        got, expected = (getattr(each, name)(*arguments) for each in (fused, fused_reference))
        pairs = zip(got, expected, strict=True) if isinstance(got, tuple) else [(got, expected)]
        for actual, truth in pairs:
            assert_near(actual, truth)
