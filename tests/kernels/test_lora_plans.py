"""Tile sizes of the LoRA kernels."""

import pytest
import torch

from kernels.lora.plans import MANY_ROWS
from kernels.lora.prefill_plans import SPLIT_ROWS, plan_shrink


@pytest.mark.parametrize("rows", [1, 64, MANY_ROWS - 1, MANY_ROWS])
def test_sums_of_few_rows_are_split_no_further_than_those_of_many(rows: int) -> None:
    """Each part is a load of its own in the code of an expand."""
    assert plan_shrink(rows, 3, 16, 4096, torch.bfloat16).parts == SPLIT_ROWS // MANY_ROWS


def test_sums_of_enough_rows_are_not_split() -> None:
    for rows in (SPLIT_ROWS, 2 * SPLIT_ROWS):
        assert plan_shrink(rows, 3, 16, 4096, torch.bfloat16).parts == 1
