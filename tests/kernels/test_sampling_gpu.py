"""Both ends of a step on a CUDA device, against the reference."""

import math

import pytest
import torch
from torch import Tensor

from kernels.entry import reference as entry_reference
from kernels.sampling import DrawParams, Penalties, reference

pytest.importorskip("triton")

from kernels.entry import gpu as entry
from kernels.sampling import gpu

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
VOCAB = 128_256
DTYPES = (torch.bfloat16, torch.float32)


def logits(kind: str, rows: int, dtype: torch.dtype, vocab: int = VOCAB) -> Tensor:
    """Rows like a language model's, rows of noise, rows of one value."""
    noise = torch.randn(rows, vocab, device="cuda")
    if kind == "equal":
        return torch.full_like(noise, 1.5).to(dtype)
    if kind == "noise":
        return noise.to(dtype)
    ranks = torch.rand(rows, vocab, device="cuda").argsort(1) + 1
    return (12 - 1.3 * ranks.log() + noise / 2).to(dtype)


def params(rows: int) -> DrawParams:
    """Every filter, alone and with others."""

    def column(*values: float) -> Tensor:
        return torch.tensor(values, dtype=torch.float64).repeat(rows)[:rows].cuda()

    return DrawParams(
        temperature=column(0.8, 1.0, 1.5, 0.8, 1e30),
        top_k=column(0, 0, 500, 0, 0, 40_000, 1).long(),
        top_p=column(0.95, 1.0, 0.3, 0.999),
        min_p=column(0.0, 0.0, 0.01),
        uniform=torch.rand(rows, dtype=torch.float64).cuda(),
    )


def check_penalties(values: Tensor) -> None:
    seen = torch.rand(7, values.shape[1], device="cuda") < 0.3
    counts = torch.randint(-6, 4, seen.shape, device="cuda").clamp(0).int()
    penalties = Penalties(
        rows=torch.tensor([4, 0, 2]).cuda(),
        slots=torch.tensor([1, 6, 3]).cuda(),
        factors=torch.tensor([[1.3, 0.7, 1.0], [0.4, 0.0, -1.1], [0.3, -0.2, 0.7]]).cuda(),
    )
    expected = values.clone()
    reference.penalise(expected, seen, counts, penalties)
    gpu.penalise(values, seen, counts, penalties)
    assert torch.equal(values, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 3, 32, 256])
def test_greedy_equals_reference_and_its_replays(rows: int, dtype: torch.dtype) -> None:
    values = (torch.randn(rows, VOCAB, device="cuda") * 3).to(dtype)
    if rows > 2:
        values[1, 5], values[2, VOCAB - 1] = math.nan, math.inf
    slots = torch.randperm(300, device="cuda")[:rows]
    last, expected_last = torch.zeros(2, 300, dtype=torch.int64, device="cuda")
    expected = reference.greedy(values, 7, slots, expected_last)
    gpu.greedy(values, 7, slots, last)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        best = gpu.greedy(values, 7, slots, last)
    for _ in range(20):
        best.fill_(-1)
        last.zero_()
        graph.replay()
        sound = expected[:, 1] == 0
        assert torch.equal(best[:, 1], expected[:, 1])
        assert torch.equal(best[sound], expected[sound])
        assert torch.equal(last, expected_last)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["language", "noise", "equal"])
def test_draws_equal_the_sorted_definition(kind: str, dtype: torch.dtype) -> None:
    values = logits(kind, 24, dtype)
    rows = torch.randperm(24, device="cuda")
    top, given = values[rows].float().amax(1), params(24)
    expected = reference.draw(values, rows, top, given)
    for _ in range(3):
        assert torch.equal(gpu.draw(values, rows, top, given), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["language", "noise", "equal"])
def test_best_keys_and_totals_equal_reference(kind: str, dtype: torch.dtype) -> None:
    values = logits(kind, 8, dtype)
    for width in (8, 128):
        expected = reference.best_keys(values, 11, width)
        assert torch.equal(gpu.best_keys(values, 11, width), expected)
    rows = torch.tensor([3, 0], device="cuda")
    got, total = gpu.log_total(values, rows), reference.log_total(values, rows)
    torch.testing.assert_close(got, total, rtol=1e-13, atol=1e-13)


def test_penalties_round_as_the_reference() -> None:
    check_penalties(logits("noise", 6, torch.float32))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [1, 130, 5001])
def test_rows_of_few_columns_equal_reference(columns: int, dtype: torch.dtype) -> None:
    """All kernels at once, in little time."""
    values = logits("language", 5, dtype, columns)
    rows = torch.tensor([4, 0, 2], device="cuda")
    slots, given = torch.tensor([1, 6, 3, 0, 2], device="cuda"), params(3)
    last, expected_last = torch.zeros(2, 7, dtype=torch.int64, device="cuda")
    best = gpu.greedy(values, 7, slots, last)
    assert torch.equal(best, reference.greedy(values, 7, slots, expected_last))
    assert torch.equal(last, expected_last)
    assert torch.equal(gpu.best_keys(values, 11, 20), reference.best_keys(values, 11, 20))
    got, total = gpu.log_total(values, rows), reference.log_total(values, rows)
    torch.testing.assert_close(got, total, rtol=1e-13, atol=1e-13)
    top = values[rows].float().amax(1)
    assert torch.equal(gpu.draw(values, rows, top, given), reference.draw(values, rows, top, given))
    check_penalties(values.float())


@pytest.mark.parametrize("rows", [1, 5, 256, 4000])
def test_entry_equals_reference(rows: int) -> None:
    tokens = torch.randint(-1, 3000, (rows,), device="cuda")
    positions = torch.randint(0, 900, (rows,), device="cuda")
    row_slots = torch.randint(0, 257, (rows,), device="cuda")
    slots = torch.randperm(257, device="cuda")[: min(rows, 256)]
    last = torch.randint(0, 3000, (257,), device="cuda")
    tables = torch.randint(-1, 9999, (257, 64), device="cuda", dtype=torch.int32)
    given = (tokens, positions, row_slots, slots, last, tables)
    got = entry.spell_out(*given, block_tokens=16, blocks=60)
    expected = entry_reference.spell_out(*given, block_tokens=16, blocks=60)
    for name in ("tokens", "write_pages", "write_slots", "page_table"):
        assert torch.equal(getattr(got, name), getattr(expected, name)), name
    weight = torch.randn(1500, 4096, device="cuda").bfloat16()
    embedded = entry.embed(expected.tokens, weight, 1000)
    assert torch.equal(embedded, entry_reference.embed(expected.tokens, weight, 1000))
