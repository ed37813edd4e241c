"""Tile sizes follow from what the host knows of a step."""

import pytest
import torch

from kernels.lora import LoraSegments
from kernels.lora.plans import SHARED_ROWS, SUM_ROWS, plan_expand, plan_shrink


def segments(rows: int, max_rows: int | None) -> LoraSegments:
    return LoraSegments(
        offsets=torch.tensor([0, rows], dtype=torch.int32),
        descriptors=torch.zeros(1, dtype=torch.int64),
        max_rank=16,
        max_rows=max_rows,
    )


@pytest.mark.parametrize(
    ("rows", "max_rows", "dot"),
    [
        (1, 1, False),
        (SUM_ROWS, SHARED_ROWS - 1, False),
        (SUM_ROWS, SHARED_ROWS, True),
        (SUM_ROWS, None, True),
        (SUM_ROWS + 1, 1, True),
    ],
)
def test_tensor_cores_serve_many_rows_of_an_adapter(
    rows: int, max_rows: int | None, dot: bool
) -> None:
    step = segments(rows, max_rows)
    shrink = plan_shrink(rows, step, 3, 4096, torch.bfloat16)
    expand = plan_expand(rows, step, 14336, torch.bfloat16)
    assert (shrink.dot, expand.dot) == (dot, dot)
    for block in (shrink.block_rows, shrink.block_k, expand.block_rows, expand.block_columns):
        assert block & (block - 1) == 0
    assert shrink.parts(4096) * shrink.block_k >= 4096
