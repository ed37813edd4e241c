"""LoRA kernels on a CUDA device, against the reference on the CPU."""

import itertools
import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.lora import LoraBatch, LoraSegments, LoraTarget
from tests.kernels.rank_rows import Arena, Shape, make_adapter, place, uniform
from tests.kernels.test_lora import POPULARITY, QKV
from tests.kernels.truth import REFERENCE, assert_near, bits

pytest.importorskip("triton")

from kernels.lora import launches
from kernels.lora.gpu import lora_expand_, lora_shrink
from kernels.lora.prefill_plans import PrefillExpandPlan, PrefillShrinkPlan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SPANS = ((0, 512), (512, 128), (640, 128))
TARGET = LoraTarget(layer=0, sites=QKV, num_sites=3, spans=SPANS)
Plans = tuple[PrefillShrinkPlan | None, PrefillExpandPlan | None]
PLANS: dict[str, Plans] = {
    "chosen": (None, None),
    "several parts": (
        PrefillShrinkPlan(block_rows=64, block_ranks=64, block_k=32, parts=3, warps=4, stages=3),
        PrefillExpandPlan(
            block_rows=64, block_columns=32, block_ranks=16, columns=128, warps=4, stages=2
        ),
    ),
}


def mixed_arena(dtype: torch.dtype) -> Arena:
    """Eight adapters of ranks 1 to 128, some with a rank of their own at a site, or none."""
    random.seed(3)
    shape = Shape(layers=1, inputs=(1024,) * 3, outputs=(512, 128, 128), dtype=dtype)
    adapters = []
    for rank in (1, 2, 3, 8, 8, 16, 64, 128):
        sites = {(0, site): rank for site in range(3)}
        if rank in (3, 16):
            sites[0, 1] = rank // 2
            del sites[0, 2]
        adapters.append(make_adapter(shape, sites))
    return place(shape, adapters, scattered=True)


def on_device(segments: LoraSegments, **changes: object) -> LoraSegments:
    fields = {
        "offsets": segments.offsets.cuda(),
        "descriptors": segments.descriptors.cuda(),
        "max_rank": segments.max_rank,
        **changes,
    }
    return LoraSegments(**fields)


def run(
    x: Tensor,
    y: Tensor,
    batch: LoraBatch,
    plans: Plans = (None, None),
) -> tuple[Tensor, Tensor]:
    """Return (h, y with the delta)."""
    out = y.clone()
    h = lora_shrink(x, batch, TARGET, plan=plans[0])
    lora_expand_(out, h, batch, TARGET, plan=plans[1])
    return h, out


@pytest.mark.parametrize("plans", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_reference(dtype: torch.dtype, plans: Plans) -> None:
    arena = mixed_arena(dtype)
    for (counts, who), bound in itertools.product(POPULARITY.values(), (True, False)):
        x, y = torch.randn(sum(counts), 1024).to(dtype), torch.randn(sum(counts), 768).to(dtype)
        truth = arena.segments(counts, who)
        segments = on_device(truth, max_rows=max(counts) if bound else None)
        h, out = run(x.cuda(), y.cuda(), arena.batch(segments), plans)
        h_true = REFERENCE.lora_shrink(x, arena.batch(truth), TARGET)
        expected = y.clone()
        REFERENCE.lora_expand_(expected, h_true, arena.batch(truth), TARGET)
        total = (h.sum(0) if h.ndim == 4 else h).cpu()
        covered = h_true != 0
        torch.testing.assert_close(total[covered], h_true[covered], rtol=1e-4, atol=1e-3)
        if dtype == torch.float32:
            torch.testing.assert_close(out.cpu(), expected, rtol=1e-4, atol=1e-2)
        else:
            assert_near(out.cpu(), expected)
        base = torch.cat(
            [torch.full((n,), w is None) for n, w in zip(counts, who, strict=True)]
            or [torch.zeros(0, dtype=torch.bool)]
        )
        assert bits(out.cpu()[base]) == bits(y[base])


def test_graph_replay_equals_eager_bit_for_bit_whatever_its_segments_hold() -> None:
    arena = mixed_arena(torch.bfloat16)
    x, y = torch.randn(16, 1024).bfloat16().cuda(), torch.randn(16, 768).bfloat16().cuda()
    offsets = torch.zeros(17, dtype=torch.int32, device="cuda")
    numbers = torch.full((16,), -1, device="cuda")
    batch = arena.batch(LoraSegments(offsets=offsets, descriptors=numbers, max_rank=128))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run(x, y, batch)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, out = run(x, y, batch)
    steps: list[tuple[list[int], list[int | None]]] = [
        ([1] * 16, [i % 8 for i in range(16)]),
        ([16], [7]),
        ([3, 0, 5, 8], [None, 1, 6, 0]),
        ([16], [None]),
    ]
    for counts, who in steps:
        exact = arena.segments(counts, who)
        offsets.fill_(16)[: len(counts) + 1] = exact.offsets.cuda()
        numbers.fill_(-1)[: len(counts)] = exact.descriptors.cuda()
        torch.cuda.synchronize()
        _, expected = run(x, y, batch)
        for _ in range(3):
            graph.replay()
            torch.cuda.synchronize()
            assert bits(out.cpu()) == bits(expected.cpu())
        truth = replace_rank(exact, 128)
        h_true = REFERENCE.lora_shrink(x.cpu(), arena.batch(truth), TARGET)
        plain = y.cpu()
        REFERENCE.lora_expand_(plain, h_true, arena.batch(truth), TARGET)
        assert_near(out.cpu(), plain)


def replace_rank(segments: LoraSegments, max_rank: int) -> LoraSegments:
    """The same segments with room for a larger rank."""
    return LoraSegments(
        offsets=segments.offsets, descriptors=segments.descriptors, max_rank=max_rank
    )


def test_launches_that_overlap_equal_launches_that_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arena = mixed_arena(torch.bfloat16)
    counts, who = POPULARITY["zipf"]
    batch = arena.batch(on_device(arena.segments(counts, who)))
    x = torch.randn(sum(counts), 1024).bfloat16().cuda()
    y = torch.randn(sum(counts), 768).bfloat16().cuda()

    def chain() -> Tensor:
        rows, out = x, y.clone()
        for _ in range(50):  # each shrink reads what the expand just before it wrote
            h = lora_shrink(rows, batch, TARGET)
            lora_expand_(out, h, batch, TARGET)
            out /= out.float().abs().amax().clamp_min(1.0)
            rows = torch.cat((out, out[:, :256]), 1)
        return out

    overlapping = chain()
    monkeypatch.setattr(launches, "overlaps", lambda device: False)
    assert bits(overlapping.cpu()) == bits(chain().cpu())
    h, first = run(x, y, batch)
    monkeypatch.undo()
    for _ in range(20):
        again = run(x, y, batch)
        assert bits(again[1].cpu()) == bits(first.cpu())
    assert h.ndim == 4


def test_rank_rows_beyond_4_gib() -> None:
    shape = Shape(layers=1, inputs=(256,) * 3, outputs=(512, 128, 128), dtype=torch.bfloat16)
    low = place(shape, [uniform(shape, 16)], scattered=True)
    shift = 5 << 30
    free, _ = torch.cuda.mem_get_info()
    if free < 2 * shift:
        pytest.skip("needs 10 GiB of free device memory")
    data = torch.empty(shift + low.data.numel(), dtype=torch.uint8, device="cuda")
    data[shift:] = low.data.cuda()
    words = low.descriptors.clone()
    words[low.numbers[0] + 2 * shape.sites :] += shift
    high = replace(low, descriptors=words)
    segments = on_device(high.segments([3, 2], [0, None]))
    x, y = torch.randn(5, 256).bfloat16(), torch.randn(5, 768).bfloat16()
    batch = LoraBatch(arena=data, descriptors=words.cuda(), segments=segments)
    _, out = run(x.cuda(), y.cuda(), batch)
    truth = low.batch(low.segments([3, 2], [0, None]))
    h_true = REFERENCE.lora_shrink(x, truth, TARGET)
    REFERENCE.lora_expand_(y, h_true, truth, TARGET)
    assert_near(out.cpu(), y)
