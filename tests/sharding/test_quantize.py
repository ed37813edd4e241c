"""Quantising a slice equals slicing the quantised whole."""

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sharding import MatrixSource, Span, assemble, blocks, deal, expand, quantize_slice
from tests.sharding.bnb_files import quantize, truth

SHAPES = [(33, 7), (18, 576), (12, 896), (10, 130), (1, 200), (200, 1), (3, 64)]


@dataclass
class Matrix:
    """A source that keeps account of what is read."""

    values: torch.Tensor
    name: str = "layer.weight"
    reads: list[torch.Size] = field(default_factory=list)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    def read_slice(self, rows: Span, cols: Span | None = None) -> torch.Tensor:
        assert rows.stop <= self.shape[0]
        assert cols is None or cols.stop <= self.shape[1]
        part = self.values[rows.slice] if cols is None else self.values[rows.slice, cols.slice]
        self.reads.append(part.shape)
        return part


def weight(shape: tuple[int, int], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(shape[0] * 1000 + shape[1])
    return torch.randn(shape, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_shards_of_any_world_equal_the_whole_quantised_by_bitsandbytes(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    values = weight(shape, dtype)
    expected = truth(*quantize(values, double_quant=False))
    rows, cols = Span(0, shape[0]), Span(0, shape[1])
    for world in range(1, 10):
        for unit in (1, 64):
            by_row = [s.times(unit, shape[0]) for s in deal(-(-shape[0] // unit), world)]
            by_col = [s.times(unit, shape[1]) for s in deal(-(-shape[1] // unit), world)]
            for parts in ([(r, cols) for r in by_row], [(rows, c) for c in by_col]):
                shards = [(quantize_slice(Matrix(values), r, c), r, c) for r, c in parts]
                assert assemble(shape, shards).equal(expected)


@settings(deadline=None)
@given(data=st.data())
def test_any_rectangle_equals_that_part_of_the_whole(data: st.DataObject) -> None:
    shape = (data.draw(st.integers(1, 30)), data.draw(st.integers(1, 150)))
    blocksize = data.draw(st.sampled_from([32, 64]))
    rows, cols = (
        Span(*sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n))))) for n in shape
    )
    values = weight(shape)
    whole = truth(*quantize(values, blocksize=blocksize, double_quant=False))
    shard = quantize_slice(Matrix(values), rows, cols, blocksize=blocksize)
    part = expand(shard)
    assert shard.shape == (rows.size, cols.size)
    assert torch.equal(part.codes, whole.codes[rows.slice, cols.slice])
    assert torch.equal(part.absmax, whole.absmax[rows.slice, cols.slice])


@pytest.mark.parametrize("width", [130, 128])
def test_chunks_join_without_a_seam(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "CHUNK_ELEMENTS", 3 * width)
    values = weight((20, width))
    rows, cols = Span(1, 19), Span(5, width - 3)
    source = Matrix(values)
    shard = quantize_slice(source, rows, cols)
    expected = truth(*quantize(values, double_quant=False))
    part = expand(shard)
    assert torch.equal(part.codes, expected.codes[rows.slice, cols.slice])
    assert torch.equal(part.absmax, expected.absmax[rows.slice, cols.slice])
    assert len(source.reads) == 6
    assert max(size[0] for size in source.reads) <= 5  # a chunk and a row beyond either end


def test_only_touched_blocks_are_read() -> None:
    source = Matrix(weight((20, 256)))
    quantize_slice(source, Span(4, 12), Span(70, 130))
    assert source.reads == [(8, 128)]


def test_a_source_need_not_be_contiguous() -> None:
    values = weight((96, 40))
    shard = quantize_slice(Matrix(values.T), Span(0, 40), Span(0, 96))
    expected = truth(*quantize(values.T.contiguous(), double_quant=False))
    assert expand(shard).equal(expected)


@pytest.mark.parametrize("width", [64, 65])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_are_refused_by_name(value: float, width: int) -> None:
    values = weight((4, width))
    values[2, 3] = value
    source: MatrixSource = Matrix(values)
    with pytest.raises(ValueError, match=r"layer\.weight: .*finite"):
        quantize_slice(source, Span(2, 3), Span(0, 10))


@pytest.mark.parametrize(
    ("values", "rows", "cols", "blocksize", "message"),
    [
        (torch.zeros(4, 64, dtype=torch.int32), Span(0, 4), Span(0, 64), 64, "floating point"),
        (torch.zeros(4), Span(0, 4), Span(0, 1), 64, r"shape \[4\]"),
        (torch.zeros(4, 64), Span(0, 5), Span(0, 64), 64, "rows 0:5"),
        (torch.zeros(4, 64), Span(0, 4), Span(0, 65), 64, "cols 0:65"),
        (torch.zeros(4, 64), Span(0, 4), Span(0, 64), 63, "blocksize=63"),
    ],
)
def test_what_cannot_be_quantised_is_refused(
    values: torch.Tensor, rows: Span, cols: Span, blocksize: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        quantize_slice(Matrix(values), rows, cols, blocksize=blocksize)
