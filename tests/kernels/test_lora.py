"""LoRA deltas: against their reference, against PEFT's formula, and their promises."""

import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.dispatch import Ops
from kernels.lora import LoraBatch, LoraSegments, LoraTarget
from tests.kernels.rank_rows import Arena, Shape, make_adapter, place, uniform
from tests.kernels.truth import REFERENCE, assert_near, bits

QKV = (0, 1, 2)
SPANS = ((0, 96), (96, 32), (128, 32))
SHAPE = Shape(layers=2, inputs=(64, 64, 64, 96), outputs=(96, 32, 32, 64))

POPULARITY: dict[str, tuple[list[int], list[int | None]]] = {
    "none": ([7, 4], [None, None]),
    "identical": ([16], [0]),
    "identical in many segments": ([1] * 9, [0] * 9),
    "distinct": ([1] * 8, list(range(8))),
    "uniform": ([3] * 8, list(range(8))),
    "zipf": ([8, 4, 3, 2, 2, 1, 1, 1], list(range(8))),
    "skewed": ([90, 1, 1], [3, 5, 6]),
    "between base rows": ([2, 3, 5, 1, 4], [None, 2, None, 6, None]),
    "with empty segments": ([0, 3, 0, 2, 0], [1, 2, None, 0, 7]),
    "prefill beside decode": ([40, 1, 1, 9, 1], [0, 1, None, 2, 0]),
}


@pytest.fixture
def mixed() -> Arena:
    """Eight adapters of ranks 1 to 128, some with a rank of their own at a site, or none."""
    random.seed(3)
    adapters = []
    for rank in (1, 2, 3, 8, 8, 16, 64, 128):
        sites = {(layer, site): rank for layer in range(2) for site in range(4)}
        if rank in (3, 16):
            sites[1, 1] = rank // 2
            del sites[0, 2]
        adapters.append(make_adapter(SHAPE, sites))
    return place(SHAPE, adapters, scattered=True)


def apply(
    ops: Ops,
    arena: Arena,
    x: Tensor,
    y: Tensor,
    segments: LoraSegments,
    *,
    layer: int = 0,
    sites: tuple[int, ...] = QKV,
    spans: tuple[tuple[int, int], ...] = SPANS,
) -> tuple[Tensor, Tensor]:
    """Return (h, y with the delta)."""
    target = LoraTarget(layer=layer, sites=sites, num_sites=arena.shape.sites, spans=spans)
    batch = arena.batch(segments)
    h = ops.lora_shrink(x, batch, target)
    y, at_once = y.clone(), y.clone()
    ops.lora_expand_(y, h, batch, target)
    ops.lora_add_(at_once, x, batch, target)
    assert bits(at_once) == bits(y)
    return h, y


def logical(
    arena: Arena,
    x: Tensor,
    y: Tensor,
    counts: Sequence[int],
    who: Sequence[int | None],
    layer: int,
    sites: tuple[int, ...],
    spans: tuple[tuple[int, int], ...],
) -> Tensor:
    """PEFT's formula in float64: y + scale * (x A^T) B^T, on each segment's rows."""
    y, row = y.double(), 0
    for count, index in zip(counts, who, strict=True):
        rows = slice(row, row + count)
        row += count
        for site, (start, width) in zip(sites, spans, strict=True):
            factors = None if index is None else arena.adapters[index].get((layer, site))
            if factors is not None:
                delta = x[rows].double() @ factors.a.double().T @ factors.b.double().T
                y[rows, start : start + width] += factors.scale * delta
    return y


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize(("counts", "who"), POPULARITY.values(), ids=POPULARITY)
def test_equals_reference_and_formula(
    ops: Ops, mixed: Arena, counts: list[int], who: list[int | None], layer: int
) -> None:
    x, y = torch.randn(sum(counts), 64), torch.randn(sum(counts), 160)
    h, out = apply(ops, mixed, x, y, mixed.segments(counts, who), layer=layer)
    h_true, out_true = apply(REFERENCE, mixed, x, y, mixed.segments(counts, who), layer=layer)
    assert_near(h, h_true)
    assert_near(out, out_true)
    assert_near(out, logical(mixed, x, y, counts, who, layer, QKV, SPANS).float())


def test_both_layers_and_all_ops_of_a_step_share_segments(ops: Ops, mixed: Arena) -> None:
    counts, who = POPULARITY["between base rows"]
    segments = mixed.segments(counts, who)
    for layer, sites, spans in (
        (0, QKV, SPANS),
        (0, (3,), ((0, 64),)),
        (1, QKV, SPANS),
        (1, (0, 2), ((128, 96), (10, 32))),
        (0, (2, 1), ((0, 32), (32, 32))),
    ):
        x, y = torch.randn(15, mixed.shape.inputs[sites[0]]), torch.randn(15, 230)
        _, out = apply(ops, mixed, x, y, segments, layer=layer, sites=sites, spans=spans)
        assert_near(out, logical(mixed, x, y, counts, who, layer, sites, spans).float())


def test_rows_and_ranks_that_are_not_covered_are_zero_in_h(ops: Ops, mixed: Arena) -> None:
    segments = mixed.segments([2, 3, 2], [None, 2, 6])  # base, r = 3, r = 64
    h, _ = apply(ops, mixed, torch.randn(7, 64), torch.zeros(7, 160), segments)
    assert h.shape == (3, 7, 64) and h.dtype == torch.float32
    assert not h[:, :2].any()
    assert h[0, 2:5, :3].all() and not h[0, 2:5, 3:].any()
    assert not h[2, 2:5].any()  # site 2 of layer 0 isn't targeted
    assert h[:, 5:].all()


def test_base_rows_and_untargeted_sites_keep_their_bits(ops: Ops, mixed: Arena) -> None:
    y = torch.randn(7, 170)
    y[0, 0], y[1, 1], y[2, 130] = float("nan"), -0.0, float("nan")
    segments = mixed.segments([2, 3, 2], [None, 2, 6])
    _, out = apply(ops, mixed, torch.randn(7, 64), y, segments)
    assert bits(out[:2]) == bits(y[:2])
    assert bits(out[2:5, 128:160]) == bits(y[2:5, 128:160])
    assert bits(out[:, 160:]) == bits(y[:, 160:])
    assert bool((out[5:, :160] != y[5:, :160]).all())


def test_nan_in_an_adapter_or_a_row_stays_there(ops: Ops) -> None:
    adapters = [uniform(SHAPE, 4) for _ in range(3)]
    clean = place(SHAPE, adapters)
    for factors in adapters[1].values():
        factors.a.fill_(float("nan"))
        factors.b.fill_(float("inf"))
    dirty = place(SHAPE, adapters)
    x, y = torch.randn(8, 64), torch.randn(8, 160)
    who: list[int | None] = [0, 1, None, 2]
    _, expected = apply(ops, clean, x, y, clean.segments([2, 2, 2, 2], who))
    x[7] = float("nan")
    _, out = apply(ops, dirty, x, y, dirty.segments([2, 2, 2, 2], who))
    assert out[2:4].isnan().all() and out[7].isnan().all()
    others = [0, 1, 4, 5, 6]
    assert bits(out[others]) == bits(expected[others])


def test_a_rewritten_record_is_read_anew_in_the_next_step(ops: Ops) -> None:
    arena = place(SHAPE, [uniform(SHAPE, 4), uniform(SHAPE, 4)])
    x, y = torch.randn(3, 64), torch.zeros(3, 160)
    first, second = (apply(ops, arena, x, y, arena.segments([3], [who]))[1] for who in (0, 1))
    size = arena.numbers[1] - arena.numbers[0]
    head = slice(arena.numbers[0], arena.numbers[0] + size)
    arena.descriptors[head] = arena.descriptors[arena.numbers[1] : arena.numbers[1] + size].clone()
    again = apply(ops, arena, x, y, arena.segments([3], [0]))[1]
    assert bits(again) == bits(second) != bits(first)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bits_are_summed_in_float32_and_rounded_once(ops: Ops, dtype: torch.dtype) -> None:
    shape = Shape(layers=1, inputs=(72,), outputs=(40,), dtype=dtype)
    arena = place(shape, [uniform(shape, 5), uniform(shape, 9)], scattered=True)
    x, y = torch.randn(6, 72).to(dtype), torch.randn(6, 44).to(dtype)
    case = {"sites": (0,), "spans": ((4, 40),)}
    counts, who = [1, 3, 2], [0, None, 1]
    _, out = apply(ops, arena, x, y, arena.segments(counts, who), **case)
    exact = logical(arena, x, y, counts, who, 0, (0,), ((4, 40),))
    step = exact.abs() * torch.finfo(dtype).eps  # half of it is one rounding
    assert bool(((out.double() - exact).abs() <= 0.51 * step + 1e-6 * exact.abs().max()).all())


@pytest.mark.parametrize(("width", "out"), [(0, 32), (64, 0), (0, 0), (33, 7), (1, 1)])
def test_empty_and_odd_widths(ops: Ops, width: int, out: int) -> None:
    shape = Shape(layers=1, inputs=(width, width), outputs=(out, 16))
    arena = place(shape, [uniform(shape, 3), uniform(shape, 130)], scattered=True)
    x, y = torch.randn(5, width), torch.randn(5, out + 16)
    case = {"sites": (0, 1), "spans": ((0, out), (out, 16))}
    h, got = apply(ops, arena, x, y, arena.segments([2, 3], [1, 0]), **case)
    h_true, expected = apply(REFERENCE, arena, x, y, arena.segments([2, 3], [1, 0]), **case)
    assert_near(h, h_true)
    assert_near(got, expected)


def test_no_rows_and_no_adapters(ops: Ops, mixed: Arena) -> None:
    h, y = apply(ops, mixed, torch.randn(0, 64), torch.randn(0, 160), mixed.segments([], []))
    assert h.shape == (3, 0, 0) and y.shape == (0, 160)
    h, _ = apply(ops, mixed, torch.randn(4, 64), torch.randn(4, 160), mixed.segments([4], [None]))
    assert h.shape == (3, 4, 0)


def test_many_rank_rows_are_gathered_in_parts(
    fast: Ops, mixed: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kernels.lora.batches._GATHER_LIMIT", 40)
    counts, who = POPULARITY["uniform"]
    x, y = torch.randn(24, 64), torch.randn(24, 160)
    _, out = apply(fast, mixed, x, y, mixed.segments(counts, who))
    assert_near(out, logical(mixed, x, y, counts, who, 0, QKV, SPANS).float())


def test_an_arena_may_begin_anywhere_in_its_storage(ops: Ops) -> None:
    arena = place(SHAPE, [uniform(SHAPE, 4)])
    shifted = torch.cat((torch.zeros(48, dtype=torch.uint8), arena.data))[48:]
    moved = Arena(
        shape=SHAPE,
        data=shifted,
        descriptors=arena.descriptors,
        numbers=arena.numbers,
        adapters=arena.adapters,
    )
    x, y = torch.randn(3, 64), torch.randn(3, 160)
    results = [apply(ops, each, x, y, each.segments([3], [0]))[1] for each in (arena, moved)]
    assert_near(results[1], results[0])


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_batch_equals_the_formula(ops: Ops, mixed: Arena, data: st.DataObject) -> None:
    who = data.draw(st.lists(st.sampled_from([None, *range(8)]), max_size=8))
    counts = data.draw(st.lists(st.integers(0, 12), min_size=len(who), max_size=len(who)))
    x, y = torch.randn(sum(counts), 64), torch.randn(sum(counts), 160)
    _, out = apply(ops, mixed, x, y, mixed.segments(counts, who), layer=1)
    assert_near(out, logical(mixed, x, y, counts, who, 1, QKV, SPANS).float())


def test_wrong_inputs_are_named(ops: Ops, mixed: Arena) -> None:
    x, y = torch.randn(3, 64), torch.randn(3, 160)
    batch = mixed.batch(mixed.segments([3], [0]))
    target = LoraTarget(layer=0, sites=QKV, num_sites=4, spans=SPANS)
    for each in (ops, REFERENCE):
        h = each.lora_shrink(x, batch, target)
        with pytest.raises(ValueError, match="x must have 3 rows"):
            each.lora_shrink(torch.randn(4, 64), batch, target)
        with pytest.raises(ValueError, match="x must be"):
            each.lora_shrink(x.int(), batch, target)
        with pytest.raises(ValueError, match="h must be"):
            each.lora_expand_(y, h.double(), batch, target)
        with pytest.raises(ValueError, match="h must be"):
            each.lora_expand_(y, h[:2], batch, target)
        with pytest.raises(ValueError, match=r"y must be floating point \[T, 160 or more\]"):
            each.lora_expand_(y[:, :159], h, batch, target)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"layer": -1}, "layer must be >= 0"),
        ({"num_sites": 0}, "num_sites >= 1"),
        ({"sites": (0, 1, 4)}, r"sites must be in \[0, 4\)"),
        ({"sites": (0, -1, 2)}, r"sites must be in \[0, 4\)"),
        ({"spans": SPANS[:2]}, "spans must have one"),
        ({"spans": ((0, 96), (95, 32), (128, 32))}, "spans must be disjoint"),
        ({"spans": ((-1, 96), (96, 32), (128, 32))}, "spans must be disjoint"),
        ({"spans": ((0, 96), (96, -1), (128, 32))}, "spans must be disjoint"),
    ],
)
def test_targets_that_cannot_be_are_refused(change: dict[str, object], match: str) -> None:
    fields: dict[str, object] = {"layer": 0, "sites": QKV, "num_sites": 4, "spans": SPANS}
    target = LoraTarget(**fields)
    assert target.columns == 160 and target.heads == (0, 2, 4)
    assert LoraTarget(**{**fields, "layer": 2}).heads == (16, 18, 20)
    with pytest.raises(ValueError, match=match):
        LoraTarget(**{**fields, **change})


def test_batches_that_cannot_be_are_refused(mixed: Arena) -> None:
    segments = mixed.segments([3], [0])
    for arena, descriptors, match in (
        (mixed.data.float(), mixed.descriptors, "arena must be"),
        (mixed.data[::2], mixed.descriptors, "arena must be"),
        (mixed.data, mixed.descriptors.int(), "descriptors must be"),
        (mixed.data, mixed.descriptors[None], "descriptors must be"),
    ):
        with pytest.raises(ValueError, match=match):
            LoraBatch(arena=arena, descriptors=descriptors, segments=segments)


def test_a_rank_above_max_rank_is_refused(ops: Ops, mixed: Arena) -> None:
    good = mixed.segments([3], [5])
    low = LoraSegments(offsets=good.offsets, descriptors=good.descriptors, max_rank=15)
    for each in (ops, REFERENCE):
        with pytest.raises(ValueError, match="max_rank must be >= 16"):
            apply(each, mixed, torch.randn(3, 64), torch.randn(3, 160), low)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("offsets", torch.zeros(2, dtype=torch.int64)),
        ("offsets", torch.zeros(3, dtype=torch.int32)),
        ("offsets", torch.zeros(4, dtype=torch.int32)[::2]),
        ("descriptors", torch.zeros(1, dtype=torch.int32)),
        ("max_rank", -1),
        ("max_rows", -1),
        ("tiles", torch.zeros(1, 4, dtype=torch.int64)),
        ("tiles", torch.zeros(1, 3, dtype=torch.int32)),
        ("tiles", torch.zeros(0, 4, dtype=torch.int32)),
    ],
)
def test_segments_that_do_not_fit_are_refused(field: str, value: object) -> None:
    fields: dict[str, object] = {
        "offsets": torch.zeros(2, dtype=torch.int32),
        "descriptors": torch.zeros(1, dtype=torch.int64),
        "max_rank": 0,
    }
    LoraSegments(**fields)
    with pytest.raises(ValueError, match=field):
        LoraSegments(**{**fields, field: value})
