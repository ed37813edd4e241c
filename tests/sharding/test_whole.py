"""Going back from shards to the whole finds what is wrong with them."""

import dataclasses

import pytest
import torch

from kernels.nf4 import NF4Weight
from sharding import Span, assemble, expand
from sharding.blocks import cut_packed

SHAPE = (6, 70)
ROWS, COLS = Span(0, 6), Span(0, 70)


def cut(rows: Span, cols: Span) -> tuple[NF4Weight, Span, Span]:
    generator = torch.Generator().manual_seed(0)
    packed = torch.randint(0, 256, (210,), dtype=torch.uint8, generator=generator)
    absmax = torch.rand(14, generator=generator)
    shard = cut_packed(
        lambda start, stop: packed[start:stop],
        absmax,
        width=70,
        rows=rows,
        cols=cols,
        blocksize=32,
    )
    return shard, rows, cols


def changed(part: tuple[NF4Weight, Span, Span], field: str) -> tuple[NF4Weight, Span, Span]:
    """The part with one bit of its last row's first element changed."""
    values = getattr(part[0], field).clone()
    values.view(torch.uint8)[-1, 0] ^= 16
    return dataclasses.replace(part[0], **{field: values}), part[1], part[2]


def test_shards_that_cover_the_whole_equal_it() -> None:
    whole = expand(cut(ROWS, COLS)[0])
    left, right = Span(0, 33), Span(33, 70)
    assert assemble(SHAPE, [cut(ROWS, left), cut(ROWS, right)]).equal(whole)


def test_replicas_may_overlap() -> None:
    whole = expand(cut(ROWS, COLS)[0])
    assert assemble(SHAPE, [cut(ROWS, COLS), cut(Span(2, 4), COLS)]).equal(whole)


@pytest.mark.parametrize("field", ["codes", "absmax"])
def test_one_changed_bit_is_found(field: str) -> None:
    whole = expand(cut(ROWS, COLS)[0])
    parts = [cut(Span(0, 3), COLS), changed(cut(Span(3, 6), COLS), field)]
    assert not assemble(SHAPE, parts).equal(whole)
    with pytest.raises(ValueError, match=r"element \[5, 0\] is not the same in two shards"):
        assemble(SHAPE, [cut(ROWS, COLS), parts[1]])


def test_a_gap_is_found() -> None:
    with pytest.raises(ValueError, match=r"element \[2, 0\] is in no shard"):
        assemble(SHAPE, [cut(Span(0, 2), COLS), cut(Span(3, 6), COLS)])


@pytest.mark.parametrize(
    ("rows", "cols"), [(Span(0, 5), COLS), (Span(1, 7), COLS), (ROWS, Span(1, 71))]
)
def test_a_shard_that_does_not_fit_its_place_is_refused(rows: Span, cols: Span) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        assemble(SHAPE, [(cut(ROWS, COLS)[0], rows, cols)])
