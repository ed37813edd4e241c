"""The packed NF4 shard and its kernels, interpreted: float16 and float32 on CPU tensors."""

import pytest
import torch
from torch import Tensor

from kernels.nf4 import NF4Weight, gpu, reference
from kernels.nf4.choice import FUSED_ROWS, as_wide_config, choose, choose_wide
from kernels.nf4.codebook import GAIN
from kernels.nf4.expand import dequantize, scaled_weight
from kernels.nf4.few_choice import choose_few
from kernels.nf4.gemm import GemmConfig, fits, multiply
from kernels.nf4.packed import can_pack, pack, unpack
from kernels.nf4.packed_weight import PackedNF4
from kernels.nf4.tables import pair_table, value_table
from kernels.nf4.tuned import WIDE
from tests.kernels.truth import REFERENCE, assert_near, bits

SHAPES = ((1, 64), (16, 256), (33, 320), (130, 512), (64, 201), (7, 1))


def make(rows: int, columns: int, blocksize: int = 64, phase: int = 0) -> NF4Weight:
    generator = torch.Generator().manual_seed(rows * 7919 + columns)
    nibbles = torch.randint(0, 16, (rows, columns + columns % 2), generator=generator)
    if columns % 2:
        nibbles[:, -1] = 0
    blocks = -(-(phase + columns) // blocksize)
    return NF4Weight(
        codes=((nibbles[:, ::2] << 4) | nibbles[:, 1::2]).to(torch.uint8),
        # Scales that were quantised themselves may come out negative.
        absmax=(torch.rand(rows, blocks, generator=generator) - 0.3) * 0.1,
        phase=torch.full((rows,), phase, dtype=torch.int32),
        columns=columns,
        blocksize=blocksize,
    )


@pytest.mark.parametrize("blocksize", [64, 128])
@pytest.mark.parametrize("shape", SHAPES)
def test_unpack_returns_the_canonical_shard_bit_for_bit(
    shape: tuple[int, int], blocksize: int
) -> None:
    w = make(*shape, blocksize=blocksize)
    back = unpack(pack(w), blocksize)
    assert torch.equal(back.codes, w.codes)
    assert torch.equal(back.absmax.view(torch.int32), w.absmax.view(torch.int32))
    assert torch.equal(back.phase, w.phase)
    assert (back.columns, back.blocksize) == (w.columns, w.blocksize)


def test_absmax_of_any_bits_survives_packing() -> None:
    w = make(16, 256)
    extremes = torch.tensor([0.0, -1e-45, 3.3e38, -1.00390625, 65504.0, -1.17e-38, 0.1, -3e38])
    w.absmax.copy_(extremes.repeat(8).view(16, 4))
    assert bits(unpack(pack(w)).absmax) == bits(w.absmax)


def test_rows_that_begin_inside_a_block_cannot_be_packed() -> None:
    w = make(4, 100, phase=3)
    assert not can_pack(w)
    with pytest.raises(ValueError, match="phase 0"):
        pack(w)


@pytest.mark.parametrize("shape", SHAPES)
def test_dequantize_is_exact_for_both_forms(shape: tuple[int, int]) -> None:
    w = make(*shape)
    expected = reference.dequantize(w, torch.float32)
    assert torch.equal(dequantize(pack(w), torch.float32), expected)
    assert torch.equal(dequantize(w, torch.float32), expected)
    inside = make(*shape, blocksize=48, phase=5)
    expected = reference.dequantize(inside, torch.float16)
    assert torch.equal(dequantize(inside, torch.float16), expected)


@pytest.mark.parametrize("shape", SHAPES)
def test_scaled_weight_is_the_weight_times_gain(shape: tuple[int, int]) -> None:
    w = make(*shape)
    expected = reference.dequantize(narrowed(w), torch.float32) * GAIN
    torch.testing.assert_close(scaled_weight(pack(w), torch.float32), expected)


def narrowed(w: NF4Weight) -> NF4Weight:
    """The weight whose absmax the products read: bfloat16."""
    return NF4Weight(
        codes=w.codes,
        absmax=(w.absmax.view(torch.int32) + 0x8000 & -0x10000).view(torch.float32),
        phase=w.phase,
        columns=w.columns,
        blocksize=w.blocksize,
    )


CONFIGS = (
    GemmConfig(tiles=4, rows=8, warps=2),
    GemmConfig(tiles=4, rows=16, split=3, warps=4),
    GemmConfig(tiles=2, rows=8, blocks=2, ways=2, split=2, warps=2),
    GemmConfig(tiles=8, rows=16, blocks=1, warps=8, scale_weights=True),
    GemmConfig(tiles=2, rows=32, split=2, warps=1, scale_weights=True),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_multiply_is_near_the_reference(
    shape: tuple[int, int], config: GemmConfig, dtype: torch.dtype
) -> None:
    w = make(*shape)
    bias = torch.randn(shape[0]).to(dtype)
    for rows, b in ((1, None), (17, bias)):
        x = torch.randn(rows, shape[1] + 3).to(dtype)[:, : shape[1]]
        y = multiply(x, pack(w), b, config)
        _near(y, reference.linear(x, narrowed(w), b))
        again = multiply(x, pack(w), b, config)
        assert torch.equal(y, again)


def test_multiply_reads_nothing_beyond_its_rows_and_columns() -> None:
    w = make(40, 200)
    around = torch.full((6, 256), float("nan"))
    around[2:5, :200] = torch.randn(3, 200)
    x = around[2:5, :200]
    y = multiply(x, pack(w), None, GemmConfig(tiles=4, rows=8, split=2, warps=2))
    _near(y, reference.linear(x, narrowed(w)))


@pytest.mark.parametrize("rows", [0, 1, 20, 260])
def test_linear_takes_every_kind_of_weight(rows: int) -> None:
    w, inside = make(33, 320), make(33, 320, phase=9)
    packed = gpu.prepare(w, torch.bfloat16)
    assert isinstance(packed, PackedNF4) and packed.shape == w.shape
    assert gpu.prepare(inside, torch.bfloat16) is inside
    assert gpu.prepare(w, torch.float16) is w
    bias = torch.randn(33)
    x = torch.randn(320, rows).T if rows == 20 else torch.randn(rows, 320)
    for b in (None, bias):
        _near(gpu.linear(x, packed, b), reference.linear(x, narrowed(w), b))
        _near(gpu.linear(x, inside, b), reference.linear(x, inside, b))


def test_norm_linear_is_the_norm_and_the_product() -> None:
    w = make(33, 320)
    x, residual, norm, bias = (torch.randn(*shape) for shape in ((3, 320), (3, 320), (320,), (33,)))
    for weight in (gpu.prepare(w, torch.bfloat16), make(33, 320, phase=9)):
        exact = narrowed(w) if isinstance(weight, PackedNF4) else weight
        y, total = gpu.norm_linear(x, residual, norm, 1e-5, weight, bias)
        expected, summed = REFERENCE.norm_linear(x, residual, norm, 1e-5, exact, bias)
        assert torch.equal(total, summed)
        _near(y, expected)


@pytest.mark.parametrize("room", [99 << 10, 227 << 10])
def test_choice_divides_every_weight_into_whole_steps_that_fit(room: int) -> None:
    for rows in range(1, FUSED_ROWS + 1):
        for features in (1, 768, 5000, 28672, 128256):
            for blocks in (4, 12, 64, 100, 224, 512):
                config = choose(rows, features, blocks, room)
                assert blocks % config.step == 0 and fits(rows, features, config)
                assert config.shared <= room
                few = choose_few(rows, features, blocks, room)
                assert few is None or 0 < few.shared(rows, blocks) <= room
    with pytest.raises(ValueError, match="rows"):
        choose(FUSED_ROWS + 1, 64, 4)


def test_every_measured_configuration_can_be_made_and_is_for_its_rows() -> None:
    for rows, shape, values in WIDE:
        config = choose_wide(rows, shape[0], shape[1] // 64)
        assert config == as_wide_config(values) and config.rows <= rows
    assert choose_wide(1, 4096, 64) is None


def test_a_pair_of_values_is_looked_up_by_a_byte() -> None:
    pairs = pair_table(torch.device("cpu")).view(torch.bfloat16).view(256, 2)
    values = value_table(torch.device("cpu"), torch.bfloat16).bfloat16()
    byte = torch.arange(256)
    assert torch.equal(pairs, torch.stack((values[byte & 15], values[byte >> 4]), dim=1))


def _near(actual: Tensor, expected: Tensor) -> None:
    if expected.dtype == torch.float32:
        torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-5)
    else:
        assert_near(actual, expected)
