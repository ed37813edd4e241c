"""Gains and biases under the interpreter, against the formula."""

from dataclasses import replace

import pytest
import torch

from kernels.lora.gpu_affine import lora_affine_
from tests.kernels.affine_cases import WIDTH, affine_arena, logical, run
from tests.kernels.interpreted.test_lora import STEPS
from tests.kernels.truth import assert_near, bits


@pytest.mark.parametrize(
    ("dtype", "biased", "bounded"), [(torch.float32, False, True), (torch.bfloat16, True, False)]
)
@pytest.mark.parametrize(("counts", "who"), STEPS.values(), ids=STEPS)
def test_equals_the_formula_and_leaves_the_rest_bit_for_bit(
    counts: list[int], who: list[int | None], dtype: torch.dtype, biased: bool, bounded: bool
) -> None:
    arena = affine_arena(dtype)
    y = torch.randn(sum(counts), WIDTH).to(dtype)
    bias = torch.randn(WIDTH).to(dtype) if biased else None
    expected, applied = logical(arena, y, bias, counts, who, layer=1)
    segments = replace(arena.segments(counts, who), max_rows=max(counts) if bounded else None)
    out = run(lora_affine_, arena, y, segments, bias, layer=1)
    assert_near(out, expected)
    assert bits(out[~applied]) == bits(y[~applied])


def test_more_columns_than_a_block_and_more_sites_than_a_launch() -> None:
    arena = affine_arena()
    sites, spans = (0, 1, 2, 3), ((300, 96), (0, 32), (40, 40), (200, 64))
    y, bias = torch.randn(3, 400), torch.randn(400)
    segments = arena.segments([1, 2], [4, 5])
    expected, _ = logical(arena, y, bias, [1, 2], [4, 5], sites=sites, spans=spans)
    assert_near(run(lora_affine_, arena, y, segments, bias, sites=sites, spans=spans), expected)


def test_nothing_to_do() -> None:
    arena = affine_arena()
    where = {"sites": (0,), "spans": ((3, 0),)}
    y = torch.randn(2, 7)
    assert bits(run(lora_affine_, arena, y, arena.segments([2], [3]), None, **where)) == bits(y)
    assert run(lora_affine_, arena, y[:0], arena.segments([0], [3]), None, **where).shape == (0, 7)
