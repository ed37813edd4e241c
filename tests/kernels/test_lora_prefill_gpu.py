"""LoRA kernels for steps of many rows on a CUDA device, against the reference."""

from collections.abc import Iterator

import pytest
import torch

from tests.kernels.test_lora_gpu import DTYPES, TARGET, mixed_arena, on_device
from tests.kernels.truth import REFERENCE, assert_near, bits

pytest.importorskip("triton")

from kernels.lora.gpu import lora_expand_, lora_shrink
from kernels.lora.plans import MANY_ROWS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
STEPS: dict[str, tuple[list[int], list[int | None]]] = {
    "identical": ([1100], [5]),
    "uniform": ([160] * 8, list(range(8))),
    "skewed": ([1000, *[1] * 60, 90], [6, *[i % 8 for i in range(60)], None]),
    "half base": ([300, 500, 64, 1, 0, 700], [None, 4, 2, 7, 1, None]),
    "none": ([1024], [None]),
}


@pytest.fixture(autouse=True)
def _poisoned_outputs() -> Iterator[None]:
    """Every `torch.empty` is full of NaN: what is read was written."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("counts", "who"), STEPS.values(), ids=STEPS)
def test_equals_reference(counts: list[int], who: list[int | None], dtype: torch.dtype) -> None:
    assert sum(counts) >= MANY_ROWS
    arena, rows = mixed_arena(dtype), sum(counts)
    x, y = torch.randn(rows, 1024).to(dtype), torch.randn(rows, 768).to(dtype)
    truth = arena.segments(counts, who)
    expected = y.clone()
    REFERENCE.lora_add_(expected, x, arena.batch(truth), TARGET)
    batch = arena.batch(on_device(truth))
    results = []
    for _ in range(2):
        out = y.cuda()
        h = lora_shrink(x.cuda(), batch, TARGET)
        lora_expand_(out, h, batch, TARGET)
        results.append(out.cpu())
    if dtype == torch.float32:
        torch.testing.assert_close(results[0], expected, rtol=1e-4, atol=1e-2)
    else:
        assert_near(results[0], expected)
    assert bits(results[0]) == bits(results[1])
    base = torch.cat([torch.full((n,), w is None) for n, w in zip(counts, who, strict=True)])
    assert bits(results[0][base]) == bits(y[base])
