"""NF4 against bitsandbytes on CPU, bit for bit, and the projection against its reference."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.dispatch import Ops
from kernels.nf4 import NF4_CODE, DenseWeight, NF4Weight
from kernels.nf4 import cpu as nf4_cpu
from tests.kernels.truth import REFERENCE, assert_near

bnb = pytest.importorskip("bitsandbytes.functional")

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def whole(flat_codes: Tensor, absmax: Tensor, rows: int, columns: int, blocksize: int) -> NF4Weight:
    """The canonical shard of a whole weight, by its definition."""
    return cut(flat_codes, absmax, columns, blocksize, range(rows), range(columns))


def cut(
    flat_codes: Tensor, absmax: Tensor, width: int, blocksize: int, rows: range, columns: range
) -> NF4Weight:
    """The canonical shard of some rows and columns, by its definition."""
    nibbles = torch.stack((flat_codes >> 4, flat_codes & 15), dim=1).flatten()
    blocks = (blocksize - 1 + len(columns)) // blocksize + 1
    codes = torch.zeros(len(rows), len(columns) + len(columns) % 2, dtype=torch.uint8)
    scales = torch.full((len(rows), blocks), float("nan"))  # what isn't touched isn't read
    phase = torch.zeros(len(rows), dtype=torch.int32)
    for i, row in enumerate(rows):
        first, end = row * width + columns.start, row * width + columns.stop
        phase[i] = first % blocksize
        codes[i, : len(columns)] = nibbles[first:end]
        touched = absmax[first // blocksize : (end - 1) // blocksize + 1]
        scales[i, : len(touched)] = touched
    packed = (codes[:, ::2] << 4) | codes[:, 1::2]
    return NF4Weight(
        codes=packed, absmax=scales, phase=phase, columns=len(columns), blocksize=blocksize
    )


def expand(codes: Tensor, absmax: Tensor, rows: int, columns: int, blocksize: int = 64) -> Tensor:
    """De-quantise by bitsandbytes, one block a row.

    Given the true shape, its AVX-512 kernel reads a wrong absmax where rows of 16 n values begin
    inside a block; blocks themselves are the same for every shape.
    """
    blocks = absmax.numel()
    padded = torch.zeros(blocks * blocksize // 2, 1, dtype=torch.uint8)
    padded[: codes.numel()] = codes.view(-1, 1)
    state = bnb.QuantState(
        absmax=absmax,
        shape=torch.Size((blocks, blocksize)),
        code=torch.tensor(NF4_CODE),
        blocksize=blocksize,
        quant_type="nf4",
        dtype=torch.float32,
    )
    return bnb.dequantize_4bit(padded, state).flatten()[: rows * columns].view(rows, columns)


def quantized(rows: int, columns: int, blocksize: int = 64) -> tuple[NF4Weight, Tensor]:
    """A shard, and what bitsandbytes de-quantises it to."""
    weight = torch.randn(rows, columns)
    codes, state = bnb.quantize_4bit(
        weight, quant_type="nf4", compress_statistics=False, blocksize=blocksize
    )
    expected = expand(codes, state.absmax, rows, columns, blocksize)
    return whole(codes.flatten(), state.absmax, rows, columns, blocksize), expected


def test_code_book_is_that_of_bitsandbytes() -> None:
    book = bnb.get_4bit_type("nf4", device="cpu")
    assert torch.equal(torch.tensor(NF4_CODE), book.float())


@pytest.mark.parametrize("blocksize", [32, 64, 4096])
@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 127, 128, 1000, 4097])
def test_quantized_blocks_equal_bitsandbytes(ops: Ops, count: int, blocksize: int) -> None:
    for flat in (torch.randn(count), torch.randn(count) * 1e-30, torch.randn(count).round()):
        expected, state = bnb.quantize_4bit(
            flat, quant_type="nf4", compress_statistics=False, blocksize=blocksize
        )
        codes, absmax = ops.quantize_blocks(flat, blocksize)
        assert torch.equal(codes, expected.flatten())
        assert torch.equal(absmax, state.absmax)
        slow_codes, slow_absmax = REFERENCE.quantize_blocks(flat, blocksize)
        assert torch.equal(codes, slow_codes) and torch.equal(absmax, slow_absmax)


def test_quantizing_chunk_by_chunk_changes_nothing(fast: Ops) -> None:
    flat = torch.randn((1 << 20) + (1 << 19) + 77)  # one and a half chunks, and a tail
    expected, state = bnb.quantize_4bit(flat, quant_type="nf4", compress_statistics=False)
    codes, absmax = fast.quantize_blocks(flat)
    assert torch.equal(codes, expected.flatten()) and torch.equal(absmax, state.absmax)


def test_midpoints_between_codes_round_as_bitsandbytes(ops: Ops) -> None:
    code = torch.tensor(NF4_CODE)
    midpoints = (code[:-1] + code[1:]) / 2
    near = [torch.nextafter(midpoints, torch.full_like(midpoints, way)) for way in (-2.0, 2.0)]
    flat = torch.cat((torch.ones(1), midpoints, *near, code, -midpoints))
    expected, _ = bnb.quantize_4bit(flat, quant_type="nf4", blocksize=128)
    assert torch.equal(ops.quantize_blocks(flat, 128)[0], expected.flatten())


def test_zero_block_has_absmax_0_and_code_7(ops: Ops) -> None:
    codes, absmax = ops.quantize_blocks(torch.cat((torch.zeros(64), torch.ones(64))))
    assert codes[:32].tolist() == [0x77] * 32
    assert absmax.tolist() == [0.0, 1.0]


def test_no_values_make_no_blocks(ops: Ops) -> None:
    codes, absmax = ops.quantize_blocks(torch.empty(0))
    assert codes.shape == absmax.shape == (0,)
    assert codes.dtype == torch.uint8


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_values_are_refused(ops: Ops, bad: float) -> None:
    flat = torch.ones(130)
    flat[129] = bad
    for quantize in (ops.quantize_blocks, REFERENCE.quantize_blocks):
        with pytest.raises(ValueError, match="flat must be finite"):
            quantize(flat)


def test_wrong_input_to_quantize_is_refused(ops: Ops) -> None:
    with pytest.raises(ValueError, match="flat must be float32"):
        ops.quantize_blocks(torch.ones(64, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="flat must be float32"):
        ops.quantize_blocks(torch.ones(2, 64))
    with pytest.raises(ValueError, match="blocksize must be >= 1"):
        ops.quantize_blocks(torch.ones(64), 0)


@pytest.mark.parametrize(
    "shape", [(5, 64), (3, 576), (7, 100), (4, 33), (9, 1), (1, 130), (130, 2)]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dequantized_bits_equal_bitsandbytes(
    ops: Ops, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    weight, expected = quantized(*shape)
    assert torch.equal(ops.dequantize(weight, dtype), expected.to(dtype))
    assert torch.equal(REFERENCE.dequantize(weight, dtype), expected.to(dtype))


@pytest.mark.parametrize("shape", [(64, 576), (16, 1536), (7, 100)])
def test_dequantized_bits_equal_bitsandbytes_on_its_own_shapes(
    ops: Ops, shape: tuple[int, int]
) -> None:
    codes, state = bnb.quantize_4bit(torch.randn(shape), quant_type="nf4")
    weight = whole(codes.flatten(), state.absmax, *shape, 64)
    assert torch.equal(ops.dequantize(weight, torch.float32), bnb.dequantize_4bit(codes, state))


@pytest.mark.parametrize("columns", [(0, 288), (288, 576), (1, 2), (575, 576), (63, 66), (0, 576)])
def test_a_cut_inside_a_block_keeps_every_bit(ops: Ops, columns: tuple[int, int]) -> None:
    """576 over 2 ranks is 4.5 blocks: the second shard begins in the middle of one."""
    codes, state = bnb.quantize_4bit(torch.randn(6, 576), quant_type="nf4")
    expected = expand(codes, state.absmax, 6, 576)[1:5, slice(*columns)]
    shard = cut(codes.flatten(), state.absmax, 576, 64, range(1, 5), range(*columns))
    assert torch.equal(ops.dequantize(shard, torch.float32), expected)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_cut_equals_the_slice_of_the_whole(data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 150))
    top = data.draw(st.integers(0, rows - 1))
    left = data.draw(st.integers(0, columns - 1))
    right = data.draw(st.integers(left + 1, columns))
    codes, state = bnb.quantize_4bit(torch.randn(rows, columns), quant_type="nf4", blocksize=32)
    expected = expand(codes, state.absmax, rows, columns, 32)[top:, left:right]
    shard = cut(codes.flatten(), state.absmax, columns, 32, range(top, rows), range(left, right))
    for dequantize in (nf4_cpu.dequantize, REFERENCE.dequantize):
        assert torch.equal(dequantize(shard, torch.float32), expected)


def test_a_weight_of_many_chunks_dequantizes_to_the_same_bits(
    fast: Ops, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, expected = quantized(37, 100)
    monkeypatch.setattr(nf4_cpu, "_CHUNK", 500)
    assert torch.equal(fast.dequantize(weight, torch.float32), expected)


@pytest.mark.parametrize("rows", [0, 1, 7, 8, 9, 33])
@pytest.mark.parametrize("shape", [(96, 64), (33, 100), (1, 576), (3, 577)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_equals_its_reference(
    ops: Ops, rows: int, shape: tuple[int, int], with_bias: bool
) -> None:
    packed, expanded = quantized(*shape)
    with_copy = NF4Weight(
        codes=packed.codes,
        absmax=packed.absmax,
        phase=packed.phase,
        columns=packed.columns,
        dense=expanded,
    )
    x, bias = torch.randn(rows, shape[1]), torch.randn(shape[0]) if with_bias else None
    expected = REFERENCE.linear(x, DenseWeight(weight=expanded), bias)
    for weight in (packed, with_copy, DenseWeight(weight=expanded)):
        assert_near(ops.linear(x, weight, bias), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_linear_in_16_bits_equals_its_reference(ops: Ops, dtype: torch.dtype) -> None:
    packed, _ = quantized(40, 96)
    x, bias = torch.randn(5, 96).to(dtype), torch.randn(40).to(dtype)
    assert_near(ops.linear(x, packed, bias), REFERENCE.linear(x, packed, bias))


def test_linear_reads_rows_that_are_not_contiguous(ops: Ops) -> None:
    weight = DenseWeight(weight=torch.randn(32, 48))
    x = torch.randn(5, 100)[:, 7:55]
    assert_near(ops.linear(x, weight), REFERENCE.linear(x.contiguous(), weight))


def test_empty_sides_give_zeros_or_nothing(ops: Ops) -> None:
    none = NF4Weight(
        codes=torch.empty(0, 32, dtype=torch.uint8),
        absmax=torch.empty(0, 1),
        phase=torch.empty(0, dtype=torch.int32),
        columns=64,
    )
    assert ops.linear(torch.randn(3, 64), none).shape == (3, 0)
    flat = NF4Weight(
        codes=torch.empty(5, 0, dtype=torch.uint8),
        absmax=torch.empty(5, 0),
        phase=torch.zeros(5, dtype=torch.int32),
        columns=0,
    )
    assert torch.equal(ops.linear(torch.empty(3, 0), flat), torch.zeros(3, 5))
    bias = torch.randn(5)
    assert torch.equal(ops.linear(torch.empty(3, 0), flat, bias), bias.expand(3, 5))
    assert ops.dequantize(flat, torch.float32).shape == (5, 0)


def test_wrong_input_to_linear_is_named(ops: Ops) -> None:
    weight = DenseWeight(weight=torch.randn(4, 6))
    with pytest.raises(ValueError, match=r"x must be floating point \[T, 6\]"):
        ops.linear(torch.randn(2, 5), weight)
    with pytest.raises(ValueError, match=r"bias must be contiguous floating point \[4\]"):
        ops.linear(torch.randn(2, 6), weight, torch.randn(6))
    with pytest.raises(ValueError, match=r"bias must be contiguous"):
        ops.linear(torch.randn(2, 6), weight, torch.randn(8)[::2])


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("codes", torch.zeros(2, 33, dtype=torch.uint8), "codes"),
        ("codes", torch.zeros(2, 32, dtype=torch.int8), "codes"),
        ("absmax", torch.ones(3, 2), "absmax"),
        ("absmax", torch.ones(2, 1), "absmax must have at least 2 columns"),
        ("phase", torch.zeros(2, dtype=torch.int64), "phase"),
        ("phase", torch.tensor([0, 64], dtype=torch.int32), "phase must be in"),
        ("columns", -1, "columns"),
        ("blocksize", 0, "blocksize"),
        ("dense", torch.ones(2, 63), "dense"),
    ],
)
def test_a_shard_that_does_not_fit_is_refused(field: str, value: object, named: str) -> None:
    fields: dict[str, object] = {
        "codes": torch.zeros(2, 32, dtype=torch.uint8),
        "absmax": torch.ones(2, 2),
        "phase": torch.tensor([0, 1], dtype=torch.int32),
        "columns": 64,
        "blocksize": 64,
        "dense": None,
    }
    NF4Weight(**fields)
    with pytest.raises(ValueError, match=named):
        NF4Weight(**{**fields, field: value})


def test_sizes_are_logical_and_bytes_are_packed() -> None:
    weight, _ = quantized(4, 33)
    assert weight.shape == (4, 33) == (weight.out_features, weight.in_features)
    assert weight.nbytes == 4 * 17 + weight.absmax.nbytes + 4 * 4
    dense = DenseWeight(weight=torch.ones(4, 33, dtype=torch.bfloat16))
    assert dense.shape == (4, 33) and dense.nbytes == 4 * 33 * 2
