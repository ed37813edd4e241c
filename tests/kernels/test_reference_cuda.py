"""The references on CUDA tensors equal themselves on CPU."""

import dataclasses

import pytest
import torch
from torch import Tensor

from kernels.attention import AttentionBatch
from kernels.dispatch import Ops
from kernels.lora import LoraSegments, LoraTarget
from kernels.nf4 import NF4Weight
from tests.kernels.paging import Pool, Tokens, deal_pages, fill, make_batch
from tests.kernels.rank_rows import Shape, place, uniform
from tests.kernels.truth import REFERENCE, assert_near

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture
def cuda() -> Ops:
    return REFERENCE


def moved(source: NF4Weight | LoraSegments | AttentionBatch) -> dict[str, object]:
    """The fields of a frozen type, tensors on the device."""
    fields = (f.name for f in dataclasses.fields(source) if f.init)
    values = {name: getattr(source, name) for name in fields}
    return {k: v.cuda() if isinstance(v, Tensor) else v for k, v in values.items()}


@pytest.mark.parametrize("dtype", DTYPES)
def test_nf4(cuda: Ops, dtype: torch.dtype) -> None:
    flat = torch.randn(33 * 100)
    codes, absmax = cuda.quantize_blocks(flat.cuda())
    for got, expected in zip((codes, absmax), REFERENCE.quantize_blocks(flat), strict=True):
        assert torch.equal(got.cpu(), expected)
    weight = NF4Weight(
        codes=codes.view(33, 50).cpu(),
        absmax=absmax[:33].cpu()[:, None].repeat(1, 3),
        phase=torch.arange(33, dtype=torch.int32),
        columns=100,
    )
    on_device, x = NF4Weight(**moved(weight)), torch.randn(5, 100).to(dtype)
    expanded = cuda.dequantize(on_device, dtype).cpu()
    assert torch.equal(expanded, REFERENCE.dequantize(weight, dtype))
    assert_near(cuda.linear(x.cuda(), on_device).cpu(), REFERENCE.linear(x, weight))


@pytest.mark.parametrize("dtype", DTYPES)
def test_lora(cuda: Ops, dtype: torch.dtype) -> None:
    shape = Shape(layers=1, inputs=(64,), outputs=(40,), dtype=dtype)
    arena = place(shape, [uniform(shape, 3), uniform(shape, 16)], scattered=True)
    segments = arena.segments([2, 1, 4], [1, None, 0])
    x, y = torch.randn(7, 64).to(dtype), torch.randn(7, 40).to(dtype)
    target = LoraTarget(layer=0, sites=(0,), num_sites=1, spans=((0, 40),))
    batch, truth = arena.batch(LoraSegments(**moved(segments))), arena.batch(segments)
    h = cuda.lora_shrink(x.cuda(), batch, target)
    out = y.cuda()
    cuda.lora_expand_(out, h, batch, target)
    h_true = REFERENCE.lora_shrink(x, truth, target)
    REFERENCE.lora_expand_(y, h_true, truth, target)
    assert_near(h.cpu(), h_true)
    assert_near(out.cpu(), y)


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention(cuda: Ops, dtype: torch.dtype, window: int | None) -> None:
    pool, other = (Pool(pages=12, kv_heads=2, dim=32, dtype=dtype) for _ in range(2))
    other.arena = other.arena.cuda()
    caches = [
        other.arena.as_strided(c.shape, c.stride(), c.storage_offset())
        for c in (other.k_cache, other.v_cache)
    ]
    sequences = [(30, 1), (40, 12), (17, 17)]
    tables = deal_pages([context for context, _ in sequences], pool)
    tokens = [Tokens.random(context, pool) for context, _ in sequences]
    fill(pool, REFERENCE, tokens, tables)
    whole = make_batch([(context, context) for context, _ in sequences], tables, 16)
    k, v = torch.cat([t.k for t in tokens]).cuda(), torch.cat([t.v for t in tokens]).cuda()
    cuda.store_kv(k, v, *caches, AttentionBatch(**moved(whole)))
    batch, q = make_batch(sequences, tables, 16), torch.randn(30, 6, 32).to(dtype)
    case = {"scale": 0.2, "window": window}
    got = cuda.paged_attention(q.cuda(), *caches, AttentionBatch(**moved(batch)), **case)
    expected = REFERENCE.paged_attention(q, pool.k_cache, pool.v_cache, batch, **case)
    assert_near(got.cpu(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_fused(cuda: Ops, dtype: torch.dtype) -> None:
    x, residual = (torch.randn(5, 64).to(dtype) for _ in range(2))
    weight = torch.randn(64).to(dtype)
    q, k, table = (
        torch.randn(5, 4, 16).to(dtype),
        torch.randn(5, 2, 16).to(dtype),
        torch.randn(9, 16),
    )
    positions = torch.randint(0, 9, (5,))
    for name, arguments in {
        "rms_norm": (x, weight, 1e-5),
        "add_rms_norm": (x, residual, weight, 1e-5),
        "silu_mul": (x,),
        "rotary": (q, k, table, positions),
    }.items():
        there = (a.cuda() if isinstance(a, Tensor) else a for a in arguments)
        got, expected = getattr(cuda, name)(*there), getattr(REFERENCE, name)(*arguments)
        pairs = zip(got, expected, strict=True) if isinstance(got, tuple) else [(got, expected)]
        for here, truth in pairs:
            assert_near(here.cpu(), truth)
