"""Sums over ranks on a CUDA device: all ranks' launches side by side on streams of their own.

A launch waits for the others while it occupies the device, and loading a module or asking for
memory may wait for the device: so everything is loaded and reserved before.
"""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from kernels.fused import reference as fused
from kernels.reduce import Mailboxes
from kernels.reduce.gpu import share_with_ranks, sum_add_rms_norm, sum_over_ranks
from kernels.reduce.reference import sum_in_order
from tests.kernels.mailboxes import deliver, make_world
from tests.kernels.truth import assert_near, bits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ROWS = (1, 7, 16, 40, 60)
FEW, MANY = 20, 64


class Side:
    """What a rank does with its part, on its own stream."""

    def __init__(self, mine: Mailboxes, residual: Tensor, weight: Tensor) -> None:
        self._mine, self._residual, self._weight = mine, residual, weight
        self._stream = torch.cuda.Stream()

    def run(self, part: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The sum, the normed total, the total, and all ranks' first values."""
        with torch.cuda.stream(self._stream):
            total = sum_over_ranks(part, self._mine)
            residual = self._residual[: part.shape[0]]
            normed = sum_add_rms_norm(part, residual, self._weight, 1e-5, self._mine)
            return total, *normed, share_with_ranks(part[0, :64].contiguous(), self._mine)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("width", [4096, 576])
def test_sums_of_changing_sizes_give_equal_bits_on_all_ranks(
    dtype: torch.dtype, ranks: int, width: int
) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    words = width * dtype.itemsize // 4
    boxes = {"row_words": 1 << (words - 1).bit_length(), "few": FEW, "many": MANY}
    residual, weight = (torch.randn(n, width, device=device).to(dtype) for n in (MANY, 1))
    sides = [Side(mine, residual, weight[0]) for mine in make_world(ranks, device, **boxes)]
    kept = []
    for rank, side in enumerate(sides):  # alone, with what the others send already there
        for rows in ROWS:
            parts = [torch.zeros(rows, width, device=device, dtype=dtype) for _ in range(ranks)]
            mine = make_world(ranks, device, **boxes)[rank]
            alone = Side(mine, residual, weight[0])
            alone._stream = side._stream
            for use in (1, 2):
                deliver(mine, parts, use)
            mine.shared.by_rank[rank].fill_(1 << 32)
            kept.append(alone.run(parts[rank]))
            torch.cuda.synchronize()
    kept.clear()
    for turn in range(40):
        parts = [torch.randn(ROWS[turn % 5], width, device=device).to(dtype) for _ in range(ranks)]
        summed = sum_in_order([part.clone() for part in parts])
        expected, total = fused.add_rms_norm(summed, residual[: len(summed)], weight[0], 1e-5)
        torch.cuda.synchronize()
        found = [side.run(part) for side, part in zip(sides, parts, strict=True)]
        torch.cuda.synchronize()
        first = torch.stack([part[0, :64] for part in parts])
        for name, each in (("sum", summed), ("", None), ("total", total), ("shared", first)):
            column = ["sum", "", "total", "shared"].index(name)
            every = {bits(results[column].cpu()) for results in found}
            assert len(every) == 1 if each is None else every == {bits(each.cpu())}, name
        assert_near(found[0][1].cpu(), expected.cpu())
        found.clear()
