"""The one launch of a LoRA delta on a CUDA device, against the reference on the CPU."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.lora import LoraBatch, LoraSegments
from kernels.lora.tiles import tile_table
from tests.kernels.rank_rows import Arena
from tests.kernels.test_lora import POPULARITY
from tests.kernels.test_lora_gpu import DTYPES, TARGET, mixed_arena
from tests.kernels.truth import REFERENCE, assert_near, bits

pytest.importorskip("triton")

from kernels.fused.gpu import add_rms_norm
from kernels.lora import decode, launches
from kernels.lora.beside import lora_beside
from kernels.lora.decode import add_
from kernels.lora.plans import AddPlan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PLANS: dict[str, AddPlan | None] = {
    "chosen": None,
    "few programs": AddPlan(
        block_k=256, shrink_steps=2, blocks=1, expand_steps=1, programs=7, registers=128
    ),
    "several steps": AddPlan(
        block_k=64, shrink_steps=3, blocks=4, expand_steps=2, programs=99, registers=96
    ),
}


def on_device(segments: LoraSegments) -> LoraSegments:
    assert segments.tiles is not None
    return replace(
        segments,
        offsets=segments.offsets.cuda(),
        descriptors=segments.descriptors.cuda(),
        tiles=segments.tiles.cuda(),
    )


def run(x: Tensor, y: Tensor, batch: LoraBatch, plan: AddPlan | None = None) -> Tensor:
    out = y.clone()
    add_(out, x, batch, TARGET, plan=plan)
    return out


def expect(arena: Arena, segments: LoraSegments, x: Tensor, y: Tensor) -> Tensor:
    out = y.clone()
    REFERENCE.lora_add_(out, x, arena.batch(segments), TARGET)
    return out


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_reference(dtype: torch.dtype, plan: AddPlan | None) -> None:
    arena = mixed_arena(dtype)
    for counts, who in POPULARITY.values():
        x, y = torch.randn(sum(counts), 1024).to(dtype), torch.randn(sum(counts), 768).to(dtype)
        segments = arena.tiled(counts, who)
        out = run(x.cuda(), y.cuda(), arena.batch(on_device(segments)), plan).cpu()
        expected = expect(arena, segments, x, y)
        if dtype == torch.float32:
            torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-2)
        else:
            assert_near(out, expected)
        base = np.repeat([w is None for w in who], counts)
        assert bits(out[base]) == bits(y[base])


def test_graph_replay_equals_eager_bit_for_bit_whatever_its_tiles_hold() -> None:
    arena = mixed_arena(torch.bfloat16)
    x, y = torch.randn(16, 1024).bfloat16().cuda(), torch.randn(16, 768).bfloat16().cuda()
    table = torch.from_numpy(tile_table(np.zeros(0, np.int64), np.zeros(0, np.int64), 16)).cuda()
    batch = arena.batch(replace(on_device(arena.tiled([16], [7])), tiles=table))
    run(x, y, batch)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(x, y, batch)
    steps: list[tuple[list[int], list[int | None]]] = [
        ([1] * 16, [i % 8 for i in range(16)]),
        ([16], [7]),
        ([3, 0, 5, 8], [None, 1, 6, 0]),
        ([16], [None]),
    ]
    for counts, who in steps:
        segments = arena.tiled(counts, who, 16)
        assert segments.tiles is not None
        table.copy_(segments.tiles)
        torch.cuda.synchronize()
        expected = run(x, y, batch).cpu()
        for _ in range(3):
            out.fill_(float("nan"))
            graph.replay()
            torch.cuda.synchronize()
            assert bits(out.cpu()) == bits(expected)
        assert_near(expected, expect(arena, segments, x.cpu(), y.cpu()))


def test_launches_that_overlap_equal_launches_that_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arena = mixed_arena(torch.bfloat16)
    counts, who = POPULARITY["zipf"]
    segments = on_device(arena.tiled(counts, who))
    batch = arena.batch(segments)
    x = torch.randn(sum(counts), 1024).bfloat16().cuda()
    y = torch.randn(sum(counts), 768).bfloat16().cuda()

    def chain() -> Tensor:
        rows, out = x, y.clone()
        for _ in range(50):  # each launch reads what the one just before it wrote
            wide = torch.cat((out, out[:, :256]), 1)
            add_(wide, rows, batch, TARGET)
            add_(out, wide, batch, TARGET)
            out /= out.float().abs().amax().clamp_min(1.0)
            rows = wide / wide.float().abs().amax().clamp_min(1.0)
        return out

    overlapping = chain()
    monkeypatch.setattr(launches, "overlaps", lambda device: False)
    assert bits(overlapping.cpu()) == bits(chain().cpu())
    first = run(x, y, batch)
    monkeypatch.undo()
    for _ in range(20):
        assert bits(run(x, y, batch).cpu()) == bits(first.cpu())


def test_what_earlier_launches_left_in_the_exchange_is_never_read() -> None:
    arena = mixed_arena(torch.bfloat16)
    for counts, who in (POPULARITY["skewed"], POPULARITY["zipf"], POPULARITY["skewed"]):
        segments = arena.tiled(counts, who)
        x, y = torch.randn(sum(counts), 1024).bfloat16(), torch.randn(sum(counts), 768).bfloat16()
        out = run(x.cuda(), y.cuda(), arena.batch(on_device(segments)))
        assert_near(out.cpu(), expect(arena, segments, x, y))
        for exchange in decode._EXCHANGES.values():
            words = exchange[decode.COUNTER_WORDS :]
            words.copy_((words >> 32 << 32) | 0x7FC00000)  # NaN, of the same launches


@pytest.mark.parametrize("counts", [[1], [1] * 16, [16], [3, 0, 5, 8]], ids=str)
def test_deltas_made_beside_products_in_a_graph_equal_those_made_before_them(
    counts: list[int],
) -> None:
    """A chain in which each projection reads what the one before it and its delta came to."""
    arena, rows = mixed_arena(torch.bfloat16), sum(counts)
    who: list[int | None] = [(None, 1, 6, 0)[i] for i in range(4)] if len(counts) == 4 else []
    segments = on_device(arena.tiled(counts, who or [(5 + i) % 8 for i in range(len(counts))]))
    batch = arena.batch(segments)
    weight = (torch.randn(768, 1024) / 32).bfloat16().cuda()
    norm, start = torch.ones(768).bfloat16().cuda(), torch.randn(rows, 1024).bfloat16().cuda()

    def chain() -> Tensor:
        x, total = start, start[:, :768].contiguous()
        for _ in range(30):
            both = lora_beside(lambda x=x: x @ weight.T, x, batch, TARGET)
            assert both is not None
            normed, total = add_rms_norm(both[0], total, norm, 1e-5, both[1])
            x = torch.cat((normed, normed[:, :256]), 1)
        return total

    expected = chain()
    assert expected.isfinite().all()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain()
    for _ in range(20):
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert bits(out.cpu()) == bits(expected.cpu())
    x = start
    y = x @ weight.T
    both = lora_beside(lambda: y, x, batch, TARGET)
    assert both is not None
    wanted = expect(arena, replace(segments, **_on_host(segments)), x.cpu(), y.cpu())
    assert_near((y + both[1]).cpu(), wanted)


def _on_host(segments: LoraSegments) -> dict[str, Tensor]:
    return {name: getattr(segments, name).cpu() for name in ("offsets", "descriptors", "tiles")}


def test_a_first_call_in_a_capture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = mixed_arena(torch.bfloat16)
    batch = arena.batch(on_device(arena.tiled([1], [5])))
    x, y = torch.randn(1, 1024).bfloat16().cuda(), torch.randn(1, 768).bfloat16().cuda()
    run(x, y, batch)  # compiles
    torch.cuda.synchronize()
    monkeypatch.setattr(decode, "_EXCHANGES", {})
    with (
        pytest.raises(RuntimeError, match="must run once before"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        run(x, y, batch)
