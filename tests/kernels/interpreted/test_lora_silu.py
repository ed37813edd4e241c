"""The gated activation with LoRA deltas on both sides of it, under the interpreter."""

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.lora import LoraBatch, LoraTarget, gpu, gpu_silu, prefill
from kernels.lora.prefill_plans import MAX_FUSED, PrefillExpandPlan
from tests.kernels.rank_rows import Arena, Shape, make_adapter, place
from tests.kernels.truth import REFERENCE, assert_near, bits

WIDTH = 72
SPANS = ((0, WIDTH), (WIDTH, WIDTH))
GATE_UP = LoraTarget(layer=1, sites=(0, 1), num_sites=3, spans=SPANS)
DOWN = LoraTarget(layer=1, sites=(2,), num_sites=3, spans=((0, 24),))
PLANS = {
    "chosen": None,
    "one chunk": PrefillExpandPlan(
        block_rows=128, block_columns=32, block_ranks=32, columns=128, warps=4, stages=2
    ),
    "many chunks": PrefillExpandPlan(
        block_rows=64, block_columns=32, block_ranks=32, columns=32, warps=4, stages=1
    ),
}


def mixed_arena(dtype: torch.dtype) -> Arena:
    """Ranks of their own at a site, sites without a rank, one adapter for each side alone."""
    random.seed(5)
    torch.manual_seed(5)
    shape = Shape(layers=2, inputs=(40, 40, WIDTH), outputs=(WIDTH, WIDTH, 24), dtype=dtype)
    ranks = [{0: 3, 1: 5, 2: 20}, {0: 16, 1: 16, 2: 16}, {0: 2, 1: 2}, {2: 4}, {1: 7}]
    adapters = [
        make_adapter(shape, {(layer, site): r for layer in range(2) for site, r in each.items()})
        for each in ranks
    ]
    return place(shape, adapters, scattered=True)


STEPS: dict[str, tuple[list[int], list[int | None]]] = {
    "every kind of segment": ([3, 70, 0, 1, 5, 64, 9], [None, 0, 1, 2, 3, 4, None]),
    "one adapter": ([66], [1]),
    "base rows alone": ([5], [None]),
}


def truth(x: Tensor, y: Tensor, batch: LoraBatch) -> tuple[Tensor, Tensor]:
    """The product and its h by the reference ops, one after the other."""
    y = y.clone()
    REFERENCE.lora_add_(y, x, batch, GATE_UP)
    out = REFERENCE.silu_mul(y)
    return out, REFERENCE.lora_shrink(out, batch, DOWN)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize(("counts", "who"), STEPS.values(), ids=STEPS)
def test_equals_the_ops_one_after_the_other(
    counts: list[int],
    who: list[int | None],
    plan: PrefillExpandPlan | None,
    dtype: torch.dtype,
) -> None:
    arena = mixed_arena(dtype)
    segments = arena.segments(counts, who)
    if segments.max_rank == 0:
        segments = type(segments)(
            offsets=segments.offsets, descriptors=segments.descriptors, max_rank=16
        )
    batch = arena.batch(segments)
    x, y = torch.randn(sum(counts), 40).to(dtype) / 8, torch.randn(sum(counts), 2 * WIDTH).to(dtype)
    h = prefill.shrink(x, batch, GATE_UP)
    before = y.clone()
    out, h_down = prefill.silu_mul(y, h, batch, GATE_UP, DOWN, plan=plan)
    assert_near(out, truth(x, y, batch)[0])
    h_true = REFERENCE.lora_shrink(out, batch, DOWN)  # of what was rounded as it was
    covered = h_true != 0
    assert_near(h_down.sum(0)[covered], h_true[covered])
    assert bits(y) == bits(before)


def test_the_op_is_there_for_many_rows_of_ranks_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = mixed_arena(torch.float16)
    counts, who = STEPS["every kind of segment"]
    batch = arena.batch(arena.segments(counts, who))
    x, y = torch.randn(sum(counts), 40).half() / 8, torch.randn(sum(counts), 2 * WIDTH).half()
    assert gpu_silu.lora_silu_mul(y, x, batch, GATE_UP, DOWN) is None
    for module in (gpu, gpu_silu):
        monkeypatch.setattr(module, "MANY_ROWS", 1)
    fused = gpu_silu.lora_silu_mul(y, x, batch, GATE_UP, DOWN)
    assert fused is not None
    out_true, h_true = truth(x, y, batch)
    assert_near(fused[0], out_true)
    z = torch.randn(sum(counts), 24).half()
    expected = z.clone()
    gpu.lora_expand_(z, fused[1], batch, DOWN)
    REFERENCE.lora_expand_(expected, h_true, batch, DOWN)
    assert_near(z, expected)
    monkeypatch.setattr(gpu_silu, "MAX_FUSED", MAX_FUSED // 8)
    assert gpu_silu.lora_silu_mul(y, x, batch, GATE_UP, DOWN) is None


def test_nan_stays_in_its_rows() -> None:
    arena = mixed_arena(torch.float32)
    batch = arena.batch(arena.segments([70, 2], [1, 0]))
    x, y = torch.randn(72, 40) / 8, torch.randn(72, 2 * WIDTH)
    x[3], y[5] = float("nan"), float("nan")
    h = prefill.shrink(x, batch, GATE_UP)
    out, h_down = prefill.silu_mul(y, h, batch, GATE_UP, DOWN)
    for result in (out, h_down.sum((0, 1))[:, :16]):
        assert result[[3, 5]].isnan().all()
        assert not result[[i for i in range(70) if i not in (3, 5)]].isnan().any()


def test_wrong_inputs_are_named() -> None:
    arena = mixed_arena(torch.float32)
    batch = arena.batch(arena.segments([3], [0]))
    x, y = torch.randn(3, 40), torch.randn(3, 2 * WIDTH)
    with pytest.raises(ValueError, match="gate_up must be"):
        gpu_silu.lora_silu_mul(y[:2], x, batch, GATE_UP, DOWN)
    with pytest.raises(ValueError, match="target must be gate's and up's halves"):
        gpu_silu.lora_silu_mul(y, x, batch, replace(GATE_UP, sites=(0,), spans=SPANS[:1]), DOWN)
    with pytest.raises(ValueError, match="down must be of one site"):
        gpu_silu.lora_silu_mul(y, x, batch, GATE_UP, GATE_UP)
