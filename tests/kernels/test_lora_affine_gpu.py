"""Gains and biases on a CUDA device, against the formula."""

from dataclasses import replace

import pytest
import torch

from kernels.lora import LoraSegments
from tests.kernels.affine_cases import WIDTH, affine_arena, logical, run
from tests.kernels.rank_rows import Arena
from tests.kernels.test_lora import POPULARITY
from tests.kernels.truth import assert_near, bits

pytest.importorskip("triton")

from kernels.lora.gpu_affine import lora_affine_

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def on_device(arena: Arena, segments: LoraSegments) -> tuple[Arena, LoraSegments]:
    moved = replace(arena, data=arena.data.cuda(), descriptors=arena.descriptors.cuda())
    return moved, replace(
        segments, offsets=segments.offsets.cuda(), descriptors=segments.descriptors.cuda()
    )


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_the_formula_and_leaves_the_rest_bit_for_bit(
    dtype: torch.dtype, biased: bool
) -> None:
    arena = affine_arena(dtype)
    for counts, who in POPULARITY.values():
        y = torch.randn(sum(counts), WIDTH).to(dtype)
        bias = torch.randn(WIDTH).to(dtype) if biased else None
        expected, applied = logical(arena, y, bias, counts, who)
        there, segments = on_device(arena, arena.segments(counts, who))
        out = run(lora_affine_, there, y.cuda(), segments, None if bias is None else bias.cuda())
        assert_near(out.cpu(), expected)
        assert bits(out.cpu()[~applied]) == bits(y[~applied])


def test_graph_replay_equals_eager_whatever_the_segments_hold() -> None:
    arena = affine_arena(torch.bfloat16)
    there, room = on_device(arena, replace(arena.segments([1] * 8, [1] * 8), max_rows=8))
    y = torch.randn(8, WIDTH).bfloat16().cuda()
    run(lora_affine_, there, y, room, None)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(lora_affine_, there, y, room, None)
    for counts, who in (
        ([1] * 8, list(range(8))),
        ([8, *[0] * 7], [4, *[None] * 7]),
        ([2, 3, 3, *[0] * 5], [None, 3, 1, *[None] * 5]),
    ):
        _, segments = on_device(arena, arena.segments(counts, who))
        room.offsets.copy_(segments.offsets)
        room.descriptors.copy_(segments.descriptors)
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        expected, _ = logical(arena, y.cpu(), None, counts, who)
        assert_near(out.cpu(), expected)
