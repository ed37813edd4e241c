"""The gated activation with LoRA deltas on both sides of it, on a CUDA device."""

import random

import pytest
import torch

from tests.kernels.rank_rows import Shape, make_adapter, place
from tests.kernels.test_lora_gpu import on_device
from tests.kernels.truth import REFERENCE, assert_near, bits

pytest.importorskip("triton")

from kernels.fused.gpu import silu_mul
from kernels.lora import LoraSegments, LoraTarget
from kernels.lora.gpu import lora_expand_
from kernels.lora.gpu_silu import lora_silu_mul
from kernels.lora.plans import MANY_ROWS
from kernels.lora.prefill_plans import MAX_FUSED

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
WIDTH = 1088
SPANS = ((0, WIDTH), (WIDTH, WIDTH))
GATE_UP = LoraTarget(layer=0, sites=(0, 1), num_sites=3, spans=SPANS)
DOWN = LoraTarget(layer=0, sites=(2,), num_sites=3, spans=((0, 512),))
STEPS: dict[str, tuple[list[int], list[int | None]]] = {
    "identical": ([1100], [1]),
    "skewed": ([1000, *[1] * 60, 90], [2, *[i % 5 for i in range(60)], None]),
    "half base": ([300, 500, 64, 1, 0, 3, 700], [None, 0, 2, 1, 1, 3, 4]),
    "few rows": ([40, 1, 1], [0, 1, None]),
}


@pytest.mark.parametrize("most", [16, 32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("counts", "who"), STEPS.values(), ids=STEPS)
def test_equals_the_ops_one_after_the_other(
    counts: list[int], who: list[int | None], dtype: torch.dtype, most: int
) -> None:
    random.seed(5)
    shape = Shape(layers=1, inputs=(256, 256, WIDTH), outputs=(WIDTH, WIDTH, 512), dtype=dtype)
    ranks = [{0: 3, 1: 5, 2: 7}, {0: most, 1: 16, 2: most}, {0: 2, 1: 2}, {2: 4}, {1: 7}]
    adapters = [make_adapter(shape, {(0, site): r for site, r in each.items()}) for each in ranks]
    arena = place(shape, adapters, scattered=True)
    exact, rows = arena.segments(counts, who), sum(counts)
    truth = LoraSegments(
        offsets=exact.offsets, descriptors=exact.descriptors, max_rank=max(most, exact.max_rank)
    )
    x, y = torch.randn(rows, 256).to(dtype) / 16, torch.randn(rows, 2 * WIDTH).to(dtype)
    batch, on_gpu = arena.batch(truth), arena.batch(on_device(truth))
    torch.use_deterministic_algorithms(True)  # every `torch.empty` is full of NaN
    try:
        results = [lora_silu_mul(y.cuda(), x.cuda(), on_gpu, GATE_UP, DOWN) for _ in range(2)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert (results[0] is not None) == (rows >= MANY_ROWS and most <= MAX_FUSED)
    if results[0] is None or results[1] is None:
        return
    out, h = results[0]
    expected = y.clone()
    REFERENCE.lora_add_(expected, x, batch, GATE_UP)
    assert_near(out.cpu(), REFERENCE.silu_mul(expected))
    assert bits(out.cpu()) == bits(results[1][0].cpu())
    base = torch.cat([torch.full((n,), w is None) for n, w in zip(counts, who, strict=True)])
    plain = silu_mul(y.cuda()).cpu()
    assert_near(out.cpu()[base], plain[base])
    z = torch.randn(rows, 512).to(dtype)
    after, z_true = z.cuda(), z.clone()
    lora_expand_(after, h, on_gpu, DOWN)
    REFERENCE.lora_add_(z_true, out.cpu(), batch, DOWN)
    assert_near(after.cpu(), z_true)
