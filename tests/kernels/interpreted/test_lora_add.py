"""The one launch of a delta under the interpreter, against the reference."""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.lora import LoraSegments, LoraTarget, decode
from kernels.lora.beside import lora_beside
from kernels.lora.decode import add_
from kernels.lora.gpu import lora_add_
from kernels.lora.plans import AddPlan
from kernels.lora.triton_exchange import LAUNCH
from tests.kernels.interpreted.test_lora import STEPS, mixed_arena
from tests.kernels.rank_rows import Arena, Shape, place, uniform
from tests.kernels.test_lora import POPULARITY, QKV
from tests.kernels.truth import REFERENCE, assert_near, bits

SPANS = ((0, 48), (48, 16), (64, 40))
PLANS: dict[str, AddPlan | None] = {
    "chosen": None,
    "several steps": AddPlan(
        block_k=64, shrink_steps=2, blocks=1, expand_steps=2, programs=999, registers=128
    ),
}

SMALL = AddPlan(block_k=32, shrink_steps=1, blocks=1, expand_steps=1, programs=999, registers=128)


def compare(
    arena: Arena,
    segments: LoraSegments,
    *,
    rows: int,
    layer: int = 0,
    sites: tuple[int, ...] = QKV,
    spans: tuple[tuple[int, int], ...] = SPANS,
    plan: AddPlan | None = None,
) -> tuple[Tensor, Tensor]:
    """Run kernel and reference on random rows; return (y before, y after)."""
    dtype, width = arena.shape.dtype, arena.shape.inputs[sites[0]]
    x = torch.randn(rows, width).to(dtype)
    y = torch.randn(rows, max(start + size for start, size in spans) + 3).to(dtype)
    target = LoraTarget(layer=layer, sites=sites, num_sites=arena.shape.sites, spans=spans)
    batch = arena.batch(segments)
    out, expected = y.clone(), y.clone()
    if plan is None:
        lora_add_(out, x, batch, target)
    else:
        add_(out, x, batch, target, plan=plan)
    REFERENCE.lora_add_(expected, x, batch, target)
    assert_near(out, expected)
    return y, out


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize(("counts", "who"), STEPS.values(), ids=STEPS)
def test_equals_reference(counts: list[int], who: list[int | None], plan: AddPlan | None) -> None:
    arena = mixed_arena(torch.float32, (1, 2, 3, 8, 8, 5, 18, 16))
    compare(arena, arena.tiled(counts, who), rows=sum(counts), plan=plan)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("rank", [1, 31, 64, 128])
def test_ranks(rank: int, plan: AddPlan | None) -> None:
    shape = Shape(layers=2, inputs=(40, 24), outputs=(24, 40), dtype=torch.float16)
    arena = place(shape, [uniform(shape, rank), uniform(shape, 1)], scattered=True)
    segments = arena.tiled([1, 2], [1, 0])
    compare(arena, segments, rows=3, layer=1, sites=(1,), spans=((2, 40),), plan=plan)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize(("width", "out"), [(0, 32), (64, 0), (0, 0), (33, 7), (1, 1)])
def test_empty_and_odd_widths(width: int, out: int, plan: AddPlan | None) -> None:
    shape = Shape(layers=1, inputs=(width, width), outputs=(out, 16))
    arena = place(shape, [uniform(shape, 3), uniform(shape, 18)], scattered=True)
    segments, spans = arena.tiled([2, 3], [1, 0]), ((0, out), (out, 16))
    compare(arena, segments, rows=5, sites=(0, 1), spans=spans, plan=plan)


@pytest.mark.parametrize("rows", [1, 3])
def test_sums_in_many_parts(rows: int) -> None:
    shape = Shape(layers=1, inputs=(600,) * 2, outputs=(40, 72), dtype=torch.float16)
    arena = place(shape, [uniform(shape, 18), uniform(shape, 3)], scattered=True)
    for adapter in (0, 1):
        segments = arena.tiled([rows], [adapter])
        compare(arena, segments, rows=rows, sites=(0, 1), spans=((0, 40), (40, 72)), plan=SMALL)


def test_sites_in_any_order_more_than_a_launch_has_and_spans_with_gaps() -> None:
    shape = Shape(layers=1, inputs=(40,) * 5, outputs=(8, 24, 16, 0, 5))
    arena = place(shape, [uniform(shape, 3), uniform(shape, 18)], scattered=True)
    segments = arena.tiled([2, 1, 3], [1, None, 0])
    spans = ((60, 5), (0, 24), (30, 0), (31, 16), (50, 8))
    compare(arena, segments, rows=6, sites=(4, 1, 3, 2, 0), spans=spans)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_base_rows_and_untargeted_sites_keep_their_bits(plan: AddPlan | None) -> None:
    arena = mixed_arena(torch.float16, (1, 2, 3, 8, 8, 5, 18, 16))
    y, out = compare(arena, arena.tiled([2, 3, 2], [None, 2, 6]), rows=7, plan=plan)
    assert bits(out[:2]) == bits(y[:2])
    assert bits(out[2:5, 64:]) == bits(y[2:5, 64:])
    assert bits(out[:, 104:]) == bits(y[:, 104:])
    assert bool((out[5:, :104] != y[5:, :104]).any())


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_nan_in_an_adapter_or_a_row_stays_there(plan: AddPlan | None) -> None:
    shape = Shape(layers=1, inputs=(40,), outputs=(24,))
    adapters = [uniform(shape, 4) for _ in range(3)]
    for factors in adapters[1].values():
        factors.a.fill_(float("nan"))
    arena = place(shape, adapters)
    x, y = torch.randn(8, 40), torch.randn(8, 24)
    x[7] = float("nan")
    segments = arena.tiled([2, 2, 2, 2], [0, 1, None, 2])
    target = LoraTarget(layer=0, sites=(0,), num_sites=1, spans=((0, 24),))
    add_(y, x, arena.batch(segments), target, plan=plan)
    assert y[2:4].isnan().all() and y[7].isnan().all()
    assert not y[[0, 1, 4, 5, 6]].isnan().any()


def test_what_earlier_launches_left_in_the_exchange_is_never_read() -> None:
    arena = mixed_arena(torch.float32, (1, 2, 3, 8, 8, 5, 18, 16))
    for counts, who in (([9], [7]), ([2, 3], [6, 3]), ([1] * 8, list(range(8))), ([9], [7])):
        segments = arena.tiled(counts, who)
        compare(arena, segments, rows=sum(counts))
        for memory in decode._EXCHANGES.values():
            words = memory[decode.COUNTER_WORDS :]
            assert bool((words >> 32 < memory[0] // LAUNCH * 2).all())
            words.copy_((words >> 32 << 32) | 0x7FC00000)  # NaN, of the same launches


def test_a_renewal_forgets_the_words_of_earlier_launches_but_not_their_number() -> None:
    arena = mixed_arena(torch.float32, (1, 2, 3, 8, 8, 5, 18, 16))
    segments = arena.tiled([2, 3], [6, 3])
    compare(arena, segments, rows=5)
    used = [m for m in decode._EXCHANGES.values() if bool(m[decode.COUNTER_WORDS :].any())]
    numbers = [int(memory[0]) for memory in used]
    assert used and all(numbers)
    decode.lora_renew(torch.device("cpu"))
    assert not any(bool(memory[decode.COUNTER_WORDS :].any()) for memory in used)
    assert [int(memory[0]) for memory in used] == numbers
    compare(arena, segments, rows=5)


def test_a_step_may_have_fewer_tiles_than_its_table_has_room_for() -> None:
    arena = mixed_arena(torch.float32, (1, 2, 3, 8, 8, 5, 18, 16))
    x, results = torch.randn(6, 72), []
    for capacity in (None, 17):
        segments = arena.tiled([2, 1, 3], [1, None, 7], capacity)
        out = torch.ones(6, 104)
        target = LoraTarget(layer=0, sites=QKV, num_sites=3, spans=SPANS)
        lora_add_(out, x, arena.batch(segments), target)
        results.append(out)
    assert bits(results[0]) == bits(results[1])


def test_fewer_programs_than_items_change_nothing() -> None:
    shape = Shape(layers=1, inputs=(40,), outputs=(64,))
    arena = place(shape, [uniform(shape, 3), uniform(shape, 18)], scattered=True)
    segments, x, results = arena.tiled([20, 3], [1, 0]), torch.randn(23, 40), []
    for programs in (999, 3, 1):
        out = torch.ones(23, 64)
        plan = AddPlan(
            block_k=32,
            shrink_steps=1,
            blocks=1,
            expand_steps=1,
            programs=programs,
            registers=128,
        )
        target = LoraTarget(layer=0, sites=(0,), num_sites=1, spans=((0, 64),))
        add_(out, x, arena.batch(segments), target, plan=plan)
        results.append(bits(out))
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("name", ["none", "zipf", "prefill beside decode"])
def test_the_delta_beside_a_product_is_what_would_be_added(name: str) -> None:
    counts, who = STEPS[name]
    arena, rows = mixed_arena(torch.float32, (1, 2, 3, 8, 8, 5, 18, 16)), sum(counts)
    segments, x, y = arena.tiled(counts, who), torch.randn(rows, 72), torch.randn(rows, 104)
    batch = arena.batch(segments)
    target = LoraTarget(layer=0, sites=QKV, num_sites=3, spans=SPANS)
    both = lora_beside(lambda: y, x, batch, target)
    if rows == 0 or segments.max_rank == 0:
        assert both is None
        return
    assert both is not None and both[0] is y
    expected = y.clone()
    REFERENCE.lora_add_(expected, x, batch, target)
    assert_near(y + both[1], expected)
    untouched = expected == y
    assert bits((y + both[1])[untouched]) == bits(y[untouched])
    nothing = torch.full_like(y, -0.0)
    assert bits((nothing + both[1])[untouched]) == bits(nothing[untouched])


def test_no_delta_stands_beside_a_product_of_many_rows_or_of_unknown_tiles() -> None:
    arena = mixed_arena(torch.float32, (1,) * 8)
    target = LoraTarget(layer=0, sites=QKV, num_sites=3, spans=SPANS)

    def never() -> Tensor:
        raise AssertionError("called")

    for rows, segments in (
        (65, arena.tiled([65], [3])),
        (4, arena.segments([4], [3])),
        (4, arena.tiled([4], [None])),
    ):
        batch = arena.batch(segments)
        assert lora_beside(never, torch.randn(rows, 72), batch, target) is None
    apart = replace(target, spans=((0, 48), (50, 16), (66, 40)))
    batch = arena.batch(arena.tiled([4], [3]))
    with pytest.raises(ValueError, match="spans must lie side by side"):
        lora_beside(never, torch.randn(4, 72), batch, apart)


def test_no_rows_and_no_adapters() -> None:
    arena = mixed_arena(torch.float32, (1,) * 8)
    compare(arena, arena.tiled([], []), rows=0)
    compare(arena, arena.tiled([4], [None]), rows=4)


def test_without_tiles_both_halves_are_launched() -> None:
    arena = mixed_arena(torch.float32, (1, 2, 3, 8, 8, 5, 18, 16))
    counts, who = POPULARITY["zipf"]
    compare(arena, arena.segments(counts, who), rows=sum(counts))


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_batch(data: st.DataObject) -> None:
    arena = mixed_arena(torch.float32, (1, 2, 3, 8, 8, 5, 18, 16))
    who = data.draw(st.lists(st.sampled_from([None, *range(8)]), max_size=6))
    counts = data.draw(st.lists(st.integers(0, 20), min_size=len(who), max_size=len(who)))
    plan = data.draw(st.sampled_from(list(PLANS.values())))
    compare(arena, arena.tiled(counts, who), rows=sum(counts), plan=plan)


def test_wrong_inputs_are_named() -> None:
    arena = mixed_arena(torch.float32, (4,) * 8)
    batch = arena.batch(arena.tiled([3], [0]))
    target = LoraTarget(layer=0, sites=(0,), num_sites=3, spans=((0, 48),))
    with pytest.raises(ValueError, match="x must be float16"):
        lora_add_(torch.randn(3, 48).double(), torch.randn(3, 72).double(), batch, target)
    with pytest.raises(ValueError, match="y must be"):
        lora_add_(torch.randn(48, 3).T, torch.randn(3, 72), batch, target)
    with pytest.raises(ValueError, match="y must be"):
        lora_add_(torch.randn(4, 48), torch.randn(3, 72), batch, target)
    with pytest.raises(ValueError, match="y must be"):
        lora_add_(torch.randn(3, 40), torch.randn(3, 72), batch, target)
