"""Gains and biases of adapters on the CPU: the formula, and what must stay as it is."""

import pytest
import torch

from kernels.dispatch import Ops
from tests.kernels.affine_cases import SHAPE, WIDTH, affine_arena, logical, run
from tests.kernels.test_lora import POPULARITY
from tests.kernels.truth import REFERENCE, assert_near, bits

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize(("counts", "who"), POPULARITY.values(), ids=POPULARITY)
def test_equals_the_formula_and_leaves_the_rest_bit_for_bit(
    ops: Ops, counts: list[int], who: list[int | None], layer: int, biased: bool
) -> None:
    for dtype in DTYPES:
        arena = affine_arena(dtype)
        y = torch.randn(sum(counts), WIDTH).to(dtype)
        bias = torch.randn(WIDTH).to(dtype) if biased else None
        expected, applied = logical(arena, y, bias, counts, who, layer=layer)
        assert applied.any() == any(index not in (None, 0) for index in who)
        for each in (ops, REFERENCE):
            out = run(each.lora_affine_, arena, y, arena.segments(counts, who), bias, layer=layer)
            assert_near(out, expected)
            assert bits(out[~applied]) == bits(y[~applied])


def test_a_row_does_not_depend_on_its_neighbours(ops: Ops) -> None:
    arena, counts, who = affine_arena(), [3, 1, 2, 1], [1, None, 4, 7]
    y, bias = torch.randn(7, WIDTH), torch.randn(WIDTH)
    whole = run(ops.lora_affine_, arena, y, arena.segments(counts, who), bias)
    owners = [index for count, index in zip(counts, who, strict=True) for _ in range(count)]
    for row, owner in enumerate(owners):
        alone = run(ops.lora_affine_, arena, y[[row]], arena.segments([1], [owner]), bias)
        assert bits(alone[0]) == bits(whole[row])


def test_not_a_number_stays_in_its_row(ops: Ops) -> None:
    arena = affine_arena()
    y = torch.zeros(4, WIDTH)
    y[1] = torch.nan
    out = run(ops.lora_affine_, arena, y, arena.segments([1, 1, 2], [1, 3, 6]), None)
    assert bool(out[1].isnan().all()) and not bool(out[[0, 2, 3]].isnan().any())


def test_sites_without_width_and_steps_without_rows(ops: Ops) -> None:
    arena = affine_arena()
    where = {"sites": (0, 3), "spans": ((0, 0), (4, 64))}
    y = torch.randn(2, 70)
    segments = arena.segments([2], [3])
    expected, _ = logical(arena, y, None, [2], [3], **where)
    assert_near(run(ops.lora_affine_, arena, y, segments, None, **where), expected)
    empty = run(ops.lora_affine_, arena, y[:0], arena.segments([0], [3]), None, **where)
    assert empty.shape == (0, 70)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"bias": torch.zeros(WIDTH - 1)}, "bias must be"),
        ({"bias": torch.zeros(WIDTH, dtype=torch.int64)}, "bias must be"),
        ({"spans": ((0, 96), (90, 32), (132, 40))}, "spans must be disjoint"),
        ({"sites": (0, 1, SHAPE.sites)}, "sites must be in"),
        ({"layer": -1}, "layer must be"),
    ],
)
def test_wrong_arguments_are_refused_by_name(ops: Ops, change: dict, match: str) -> None:
    arena = affine_arena()
    arguments = {"bias": None, **change}
    for each in (ops, REFERENCE):
        with pytest.raises(ValueError, match=match):
            run(
                each.lora_affine_,
                arena,
                torch.zeros(2, WIDTH),
                arena.segments([2], [1]),
                **arguments,
            )


def test_segments_must_cover_all_rows(ops: Ops) -> None:
    arena = affine_arena()
    with pytest.raises(ValueError, match="y must have 2 rows"):
        run(ops.lora_affine_, arena, torch.zeros(3, WIDTH), arena.segments([2], [1]), None)
