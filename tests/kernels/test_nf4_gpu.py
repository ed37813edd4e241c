"""NF4 on a CUDA device, in bfloat16, against the reference on the same values."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from kernels.nf4 import DenseWeight, NF4Weight, reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHAPES = ((4096, 4096), (4096, 14336), (384, 512), (130, 328), (7, 64))
ROWS = (1, 4, 7, 16, 33, 64, 129, 256, 300)


def make(rows: int, columns: int, *, blocksize: int = 64, phase: int = 0) -> NF4Weight:
    nibbles = torch.randint(0, 256, (rows, (columns + 1) // 2), dtype=torch.uint8)
    blocks = -(-(phase + columns) // blocksize)
    return NF4Weight(
        codes=nibbles.cuda(),
        absmax=(torch.rand(rows, blocks) * 0.03 - 0.01).cuda(),
        phase=torch.full((rows,), phase, dtype=torch.int32).cuda(),
        columns=columns,
        blocksize=blocksize,
    )


def distance(actual: Tensor, expected: Tensor) -> float:
    assert actual.shape == expected.shape and actual.dtype == torch.bfloat16
    return float((actual.float() - expected).norm() / expected.norm())


def exact(x: Tensor, w: NF4Weight, bias: Tensor | None) -> Tensor:
    y = x.float() @ reference.dequantize(w, torch.float32).T
    return y if bias is None else y + bias.float()


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Every `torch.empty` is full of NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("shape", SHAPES)
def test_linear_is_within_the_roundings_of_bfloat16(shape: tuple[int, int], rows: int) -> None:
    from kernels.nf4 import gpu

    w = make(*shape)
    packed = gpu.prepare(w, torch.bfloat16)
    assert not isinstance(packed, NF4Weight)
    x = torch.randn(rows, shape[1], device="cuda").bfloat16()
    for bias in (None, torch.randn(shape[0], device="cuda").bfloat16()):
        assert distance(gpu.linear(x, packed, bias), exact(x, w, bias)) < 6e-3


WIDE = (
    (16, 4, 4, 2, 6, 2, 1),
    (32, 8, 4, 2, 4, 2, 1),
    (32, 8, 8, 2, 4, 1, 0),
    (64, 4, 4, 1, 5, 3, 0),
    (64, 8, 8, 2, 4, 1, 1),
    (128, 4, 4, 1, 4, 2, 0),
    (128, 16, 8, 1, 4, 1, 0),
    (256, 8, 8, 1, 4, 1, 0),
    (256, 8, 8, 1, 3, 1, 1),
)
"""`choice.WIDE_FIELDS`."""


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9, reason="needs Hopper"
)
@pytest.mark.parametrize("values", WIDE, ids=str)
@pytest.mark.parametrize(
    "shape", [(4096, 4096), (6144, 1024), (136, 328), (384, 512), (8, 64), (25344, 512)]
)
def test_the_product_for_many_rows_writes_all_and_the_same_each_time(
    shape: tuple[int, int], values: tuple[int, ...]
) -> None:
    """Parts of outputs, tails of rows, features and columns; memory of the result is poisoned.

    On an H200 the last program has the end of an output and a whole one of the last shape.
    """
    from kernels.nf4 import wide
    from kernels.nf4.choice import as_wide_config
    from kernels.nf4.packed import pack

    config = as_wide_config(values)
    w = make(*shape)
    packed = pack(w)
    for rows in {1, 17, config.rows, config.rows + 5}:
        x = torch.randn(rows, shape[1] + 8, device="cuda").bfloat16()[:, : shape[1]]
        assert wide.can_take(x, packed, config)
        for bias in (None, torch.randn(shape[0], device="cuda").bfloat16()):
            with poisoned_memory():
                y = wide.multiply_wide(x, packed, bias, config)
            assert distance(y, exact(x, w, bias)) < 6e-3
            assert torch.equal(y, wide.multiply_wide(x, packed, bias, config))


def test_rows_that_the_hardware_cannot_copy_are_multiplied_all_the_same() -> None:
    from kernels.nf4 import gpu

    for shape, offset in (((4096, 4096), 1), ((4099, 4096), 0), ((4096, 4100), 0)):
        w = make(*shape)
        x = torch.randn(64, shape[1] + offset, device="cuda").bfloat16()[:, offset:]
        assert distance(gpu.linear(x, gpu.prepare(w, torch.bfloat16)), exact(x, w, None)) < 6e-3


@pytest.mark.parametrize("shape", SHAPES)
def test_norm_linear_is_within_the_roundings_of_bfloat16(shape: tuple[int, int]) -> None:
    from kernels.fused.reference import add_rms_norm
    from kernels.nf4 import gpu

    w = make(*shape)
    packed = gpu.prepare(w, torch.bfloat16)
    norm = torch.rand(shape[1], device="cuda").bfloat16()
    for rows in (1, 3, 33):
        wide = torch.randn(rows, shape[1] + 8, device="cuda").bfloat16()
        x, residual = wide[:, : shape[1]], torch.randn(rows, shape[1], device="cuda").bfloat16() * 3
        before = x.clone(), residual.clone()
        normed, total = add_rms_norm(x, residual, norm, 1e-5)
        for bias in (None, torch.randn(shape[0], device="cuda").bfloat16()):
            y, summed = gpu.norm_linear(x, residual, norm, 1e-5, packed, bias)
            assert torch.equal(summed, total)
            assert distance(y, exact(normed, w, bias)) < 6e-3
        assert torch.equal(x, before[0]) and torch.equal(residual, before[1])


def test_few_rows_read_nothing_beyond_their_rows_and_columns() -> None:
    from kernels.nf4 import gpu

    w = make(200, 328)
    packed = gpu.prepare(w, torch.bfloat16)
    around = torch.full((8, 512), float("nan"), device="cuda", dtype=torch.bfloat16)
    for rows in (1, 2, 3, 4):
        x = around[2 : 2 + rows, 64 : 64 + 328]
        x.copy_(torch.randn(rows, 328))
        assert distance(gpu.linear(x, packed), exact(x, w, None)) < 6e-3
        x.fill_(float("nan"))


def test_rows_that_begin_inside_a_block_are_expanded_exactly() -> None:
    from kernels.nf4 import gpu

    w = make(96, 330, phase=7)
    assert gpu.prepare(w, torch.bfloat16) is w
    assert torch.equal(gpu.dequantize(w, torch.float32), reference.dequantize(w, torch.float32))


def test_rows_that_begin_inside_a_block_are_multiplied() -> None:
    from kernels.nf4 import gpu

    w = make(96, 330, phase=7)
    x = torch.randn(5, 330, device="cuda").bfloat16()
    assert distance(gpu.linear(x, w), exact(x, w, None)) < 6e-3


def test_the_scaled_weight_is_the_weight_times_gain() -> None:
    from kernels.nf4.codebook import GAIN
    from kernels.nf4.expand import scaled_weight
    from kernels.nf4.packed import pack

    w = make(130, 328)
    expected = GAIN * reference.dequantize(w, torch.float32)
    assert distance(scaled_weight(pack(w), torch.bfloat16), expected) < 6e-3


def test_unpacked_on_the_device_is_the_canonical_shard_bit_for_bit() -> None:
    from kernels.nf4 import gpu
    from kernels.nf4.packed import pack, unpack

    w = make(130, 328)
    back = unpack(pack(w))
    assert torch.equal(back.codes, w.codes) and torch.equal(back.absmax, w.absmax)
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(gpu.dequantize(pack(w), dtype), reference.dequantize(w, dtype))


@pytest.mark.parametrize("rows", [1, 4, 16])
def test_a_chain_of_products_replays_bit_for_bit(rows: int) -> None:
    """Each product reads what the one before wrote, and all share one workspace."""
    from kernels.nf4 import gpu

    shapes = [(4096, 4096), (14336, 4096), (4096, 14336), (4096, 4096)]
    weights = [gpu.prepare(make(*shape), torch.bfloat16) for shape in shapes]
    x = torch.randn(rows, 4096, device="cuda").bfloat16()

    def chain() -> Tensor:
        y = x
        for w in weights:
            y = gpu.linear(y, w)
        return y

    torch.cuda.synchronize()
    expected = chain().clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = chain()
    for _ in range(20):
        y.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, expected)


def test_nothing_in_and_nothing_out() -> None:
    from kernels.nf4 import gpu

    packed = gpu.prepare(make(64, 64), torch.bfloat16)
    x = torch.empty(0, 64, device="cuda", dtype=torch.bfloat16)
    assert gpu.linear(x, packed).shape == (0, 64)
    dense = DenseWeight(weight=torch.empty(8, 0, device="cuda", dtype=torch.bfloat16))
    y = gpu.linear(torch.empty(3, 0, device="cuda", dtype=torch.bfloat16), dense)
    assert torch.equal(y, torch.zeros_like(y)) and y.shape == (3, 8)
