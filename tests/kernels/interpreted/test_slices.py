"""Rows of packed weights under the interpreter: exact, wherever they begin."""

import pytest
import torch

from kernels.nf4 import NF4Weight
from kernels.nf4.packed import pack
from kernels.nf4.reference import dequantize
from kernels.nf4.slices import float_rows


@pytest.mark.parametrize(("start", "stop"), [(0, 200), (3, 5), (16, 48), (17, 131), (199, 200)])
def test_rows_of_packed_weights_are_exact(start: int, stop: int) -> None:
    weight = NF4Weight(
        codes=torch.randint(0, 256, (200, 75), dtype=torch.uint8),
        absmax=torch.rand(200, 3),
        phase=torch.zeros(200, dtype=torch.int32),
        columns=150,
    )
    rows = float_rows(pack(weight), start, stop, dequantize)
    assert torch.equal(rows, dequantize(weight, torch.float32)[start:stop])
