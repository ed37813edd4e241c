"""LoRA kernels for CUDA under the interpreter, against the reference."""

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.lora import LoraSegments, LoraTarget
from kernels.lora.gpu import lora_expand_, lora_shrink
from kernels.lora.prefill_plans import PrefillExpandPlan, PrefillShrinkPlan
from tests.kernels.rank_rows import Arena, Shape, make_adapter, place, uniform
from tests.kernels.test_lora import POPULARITY, QKV
from tests.kernels.truth import REFERENCE, assert_near, bits

SPANS = ((0, 48), (48, 16), (64, 40))
STEPS: dict[str, tuple[list[int], list[int | None]]] = {
    **POPULARITY,
    "uniform": ([3] * 4, [1, 2, 6, 7]),
    "zipf": ([6, 3, 2, 1], [0, 7, 5, 2]),
    "skewed": ([18, 1, 1], [3, 5, 6]),
    "prefill beside decode": ([18, 1, 1, 9, 1], [0, 1, None, 2, 0]),
}
"""Small, for the interpreter is slow; still of more rows than a block."""
Plans = tuple[PrefillShrinkPlan | None, PrefillExpandPlan | None]
PLANS: dict[str, Plans] = {
    "chosen": (None, None),
    "small blocks": (
        PrefillShrinkPlan(block_rows=16, block_ranks=16, block_k=64, parts=1, warps=4, stages=1),
        PrefillExpandPlan(
            block_rows=64, block_columns=64, block_ranks=32, columns=64, warps=4, stages=1
        ),
    ),
    "several parts": (
        PrefillShrinkPlan(block_rows=64, block_ranks=32, block_k=16, parts=3, warps=4, stages=2),
        PrefillExpandPlan(
            block_rows=64, block_columns=32, block_ranks=16, columns=64, warps=4, stages=2
        ),
    ),
}


def with_bound(segments: LoraSegments, counts: list[int]) -> LoraSegments:
    """The same, with the longest segment told."""
    return LoraSegments(
        offsets=segments.offsets,
        descriptors=segments.descriptors,
        max_rank=segments.max_rank,
        max_rows=max(counts, default=0),
    )


def compare(
    arena: Arena,
    segments: LoraSegments,
    *,
    rows: int,
    layer: int = 0,
    sites: tuple[int, ...] = QKV,
    spans: tuple[tuple[int, int], ...] = SPANS,
    plans: Plans = (None, None),
) -> tuple[Tensor, Tensor, Tensor]:
    """Run kernels and reference on random rows; return (y before, y after, x)."""
    dtype, width = arena.shape.dtype, arena.shape.inputs[sites[0]]
    x = torch.randn(rows, width).to(dtype)
    y = torch.randn(rows, max(start + size for start, size in spans) + 3).to(dtype)
    target = LoraTarget(layer=layer, sites=sites, num_sites=arena.shape.sites, spans=spans)
    batch = arena.batch(segments)
    h = lora_shrink(x, batch, target, plan=plans[0])
    h_true = REFERENCE.lora_shrink(x, batch, target)
    covered = h_true != 0
    total = h.sum(0) if h.ndim == 4 else h
    assert total.shape == h_true.shape and h.dtype == torch.float32
    assert_near(total[covered], h_true[covered])
    out, expected = y.clone(), y.clone()
    lora_expand_(out, h, batch, target, plan=plans[1])
    REFERENCE.lora_expand_(expected, h_true, batch, target)
    assert_near(out, expected)
    return y, out, x


def mixed_arena(dtype: torch.dtype, ranks: tuple[int, ...]) -> Arena:
    """Eight adapters, the third and the sixth with a rank of their own at a site, and none."""
    random.seed(3)
    torch.manual_seed(3)
    shape = Shape(layers=1, inputs=(72, 72, 72), outputs=(48, 16, 40), dtype=dtype)
    adapters = []
    for index, rank in enumerate(ranks):
        sites = {(0, site): rank for site in range(3)}
        if index in (2, 5):
            sites[0, 1] = rank // 2 + 1
            del sites[0, 2]
        adapters.append(make_adapter(shape, sites))
    return place(shape, adapters, scattered=True)


@pytest.mark.parametrize("plans", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize(("counts", "who"), STEPS.values(), ids=STEPS)
def test_equals_reference(
    counts: list[int],
    who: list[int | None],
    plans: Plans,
) -> None:
    arena = mixed_arena(torch.float32, (1, 2, 3, 8, 8, 5, 18, 16))
    compare(arena, arena.segments(counts, who), rows=sum(counts), plans=plans)


@pytest.mark.parametrize("plans", PLANS.values(), ids=PLANS)
def test_knowing_the_longest_segment_changes_nothing_but_the_grid(
    plans: Plans,
) -> None:
    arena = mixed_arena(torch.float16, (1, 2, 3, 8, 8, 5, 18, 16))
    for name in ("distinct", "between base rows", "with empty segments"):
        counts, who = POPULARITY[name]
        bounded = with_bound(arena.segments(counts, who), counts)
        compare(arena, bounded, rows=sum(counts), plans=plans)


@pytest.mark.parametrize("plans", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("rank", [1, 31, 64, 128])
def test_ranks(rank: int, plans: Plans) -> None:
    shape = Shape(layers=2, inputs=(40, 24), outputs=(24, 40), dtype=torch.float16)
    arena = place(shape, [uniform(shape, rank), uniform(shape, 1)], scattered=True)
    segments = arena.segments([1, 2], [1, 0])
    compare(arena, segments, rows=3, layer=1, sites=(1,), spans=((2, 40),), plans=plans)


@pytest.mark.parametrize("plans", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize(("width", "out"), [(0, 32), (64, 0), (0, 0), (33, 7), (1, 1)])
def test_empty_and_odd_widths(width: int, out: int, plans: Plans) -> None:
    shape = Shape(layers=1, inputs=(width, width), outputs=(out, 16))
    arena = place(shape, [uniform(shape, 3), uniform(shape, 18)], scattered=True)
    segments, spans = arena.segments([2, 3], [1, 0]), ((0, out), (out, 16))
    compare(arena, segments, rows=5, sites=(0, 1), spans=spans, plans=plans)


def test_sites_in_any_order_more_than_a_launch_has_and_spans_with_gaps() -> None:
    shape = Shape(layers=1, inputs=(40,) * 5, outputs=(8, 24, 16, 0, 5))
    arena = place(shape, [uniform(shape, 3), uniform(shape, 18)], scattered=True)
    segments = arena.segments([2, 1, 3], [1, None, 0])
    spans = ((60, 5), (0, 24), (30, 0), (31, 16), (50, 8))
    compare(arena, segments, rows=6, sites=(4, 1, 3, 2, 0), spans=spans)


def test_base_rows_and_untargeted_sites_keep_their_bits() -> None:
    arena = mixed_arena(torch.float16, (1, 2, 3, 8, 8, 5, 18, 16))
    segments = arena.segments([2, 3, 2], [None, 2, 6])
    for plans in PLANS.values():
        y, out, _ = compare(arena, segments, rows=7, plans=plans)
        assert bits(out[:2]) == bits(y[:2])
        assert bits(out[2:5, 64:]) == bits(y[2:5, 64:])
        assert bits(out[:, 104:]) == bits(y[:, 104:])
        assert bool((out[5:, :104] != y[5:, :104]).any())


def test_nan_in_an_adapter_or_a_row_stays_there() -> None:
    shape = Shape(layers=1, inputs=(40,), outputs=(24,))
    adapters = [uniform(shape, 4) for _ in range(3)]
    for factors in adapters[1].values():
        factors.a.fill_(float("nan"))
    arena = place(shape, adapters)
    x, y = torch.randn(8, 40), torch.randn(8, 24)
    x[7] = float("nan")
    batch = arena.batch(arena.segments([2, 2, 2, 2], [0, 1, None, 2]))
    target = LoraTarget(layer=0, sites=(0,), num_sites=1, spans=((0, 24),))
    for shrink_plan, expand_plan in PLANS.values():
        out = y.clone()
        h = lora_shrink(x, batch, target, plan=shrink_plan)
        lora_expand_(out, h, batch, target, plan=expand_plan)
        assert out[2:4].isnan().all() and out[7].isnan().all()
        assert not out[[0, 1, 4, 5, 6]].isnan().any()


def test_a_step_may_have_fewer_segments_than_its_metadata_has_room_for() -> None:
    arena = mixed_arena(torch.float32, (1, 2, 3, 8, 8, 5, 18, 16))
    exact = replace(arena.segments([2, 1, 3], [1, None, 7]), max_rank=24)
    padded = LoraSegments(
        offsets=torch.cat((exact.offsets, torch.full((13,), 6, dtype=torch.int32))),
        descriptors=torch.cat((exact.descriptors, torch.full((13,), -1))),
        max_rank=24,
    )
    x, results = torch.randn(6, 72), []
    for segments in (exact, padded):
        batch = arena.batch(segments)
        target = LoraTarget(layer=0, sites=QKV, num_sites=3, spans=SPANS)
        out = torch.ones(6, 104)
        h = lora_shrink(x, batch, target)
        lora_expand_(out, h, batch, target)
        results.append(out)
    assert bits(results[0]) == bits(results[1])


def test_no_rows_and_no_adapters() -> None:
    arena = mixed_arena(torch.float32, (1,) * 8)
    compare(arena, arena.segments([], []), rows=0)
    compare(arena, arena.segments([4], [None]), rows=4)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_batch(data: st.DataObject) -> None:
    arena = mixed_arena(torch.float32, (1, 2, 3, 8, 8, 5, 18, 16))
    who = data.draw(st.lists(st.sampled_from([None, *range(8)]), max_size=6))
    counts = data.draw(st.lists(st.integers(0, 20), min_size=len(who), max_size=len(who)))
    plans = data.draw(st.sampled_from(list(PLANS.values())))
    compare(arena, arena.segments(counts, who), rows=sum(counts), plans=plans)


def test_wrong_inputs_are_named() -> None:
    arena = mixed_arena(torch.float32, (4,) * 8)
    batch = arena.batch(arena.segments([3], [0]))
    target = LoraTarget(layer=0, sites=(0,), num_sites=3, spans=((0, 48),))
    with pytest.raises(ValueError, match="x must be float16"):
        lora_shrink(torch.randn(3, 72).double(), batch, target)
    h = lora_shrink(torch.randn(3, 72), batch, target)
    with pytest.raises(ValueError, match="y must be of contiguous rows"):
        lora_expand_(torch.randn(48, 3).T, h, batch, target)
    with pytest.raises(ValueError, match="h must be"):
        lora_expand_(torch.randn(3, 48), h[:, :, :2], batch, target)
