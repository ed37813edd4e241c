"""Rows of packed weights under the interpreter: exact, wherever they begin."""

import pytest
import torch
from torch import Tensor

from kernels.nf4 import NF4Weight, expand
from kernels.nf4.packed import COLUMNS, ROWS, pack
from kernels.nf4.packed_weight import PackedNF4
from kernels.nf4.reference import dequantize
from kernels.nf4.slices import float_rows

EXPAND = expand.dequantize


def padded_only(w: PackedNF4, dtype: torch.dtype) -> Tensor:
    """The kernel reads all of the padding, so it must be there."""
    tiles, words = w.words.shape
    assert tiles * 16 % ROWS == 0 and words // 2 % COLUMNS == 0 and w.words.is_contiguous()
    for plane in (w.scales, w.rest):
        assert plane.shape[1] == tiles * 16 and plane.is_contiguous()
    return EXPAND(w, dtype)


@pytest.mark.parametrize(
    ("start", "stop"), [(0, 300), (3, 5), (16, 48), (17, 131), (299, 300), (128, 257)]
)
def test_rows_of_packed_weights_are_exact(
    start: int, stop: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = NF4Weight(
        codes=torch.randint(0, 256, (300, 75), dtype=torch.uint8),
        absmax=torch.rand(300, 3),
        phase=torch.zeros(300, dtype=torch.int32),
        columns=150,
    )
    monkeypatch.setattr(expand, "dequantize", padded_only)
    rows = float_rows(pack(weight), start, stop, dequantize)
    assert torch.equal(rows, dequantize(weight, torch.float32)[start:stop])
