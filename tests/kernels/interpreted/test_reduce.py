"""One rank's side of a sum over ranks, with what the others send already there."""

import pytest
import torch
from torch import Tensor

from kernels.fused import reference as fused
from kernels.reduce import SHARE_PIECE, Mailboxes
from kernels.reduce.gpu import share_with_ranks, sum_add_rms_norm, sum_over_ranks
from kernels.reduce.reference import sum_in_order
from tests.kernels.mailboxes import KINDS, boxes_of, deliver, make_world, pieces
from tests.kernels.truth import assert_near, bits

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.float16)
WORLDS = ((2, 0), (2, 1), (3, 1), (8, 7))
"""Ranks, and which one is looked at."""
ROWS = ((1, 0, "few"), (5, 7, "few"), (6, 6, "many"), (9, 5, "many"))
"""Rows, uses before, and the mailboxes that they go through."""


def width(dtype: torch.dtype, words: int) -> int:
    return words * 4 // dtype.itemsize


def check_sent(mine: Mailboxes, part: Tensor, use: int, kind: str) -> None:
    """A rank's pieces are in every other's mailboxes of this use, and nothing else is anywhere."""
    for each in KINDS:
        uses = getattr(mine, each).uses
        sent = pieces(part, use, kind, boxes_of(mine, mine.rank, kind).shape[3])
        count = sent.shape[0] if each == kind else 0
        assert uses.tolist() == [use] * count + [use - 1] * (uses.shape[0] - count)
        for other in set(range(len(mine.few.by_rank))) - {mine.rank}:
            boxes = boxes_of(mine, other, each)
            assert boxes.count_nonzero() == (sent.count_nonzero() if count else 0)
            if count:
                assert torch.equal(boxes[:count, use & 1, mine.rank], sent)
    for other in set(range(len(mine.few.by_rank))) - {mine.rank}:
        signals = mine.many.signals[other].view(-1, 2, len(mine.few.by_rank))
        count = part.shape[0] if kind == "many" else 0
        assert signals[:count, use & 1, mine.rank].tolist() == [use] * count
        assert signals.count_nonzero() == count


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("ranks", "rank"), WORLDS)
@pytest.mark.parametrize(("rows", "uses", "kind"), ROWS)
def test_parts_are_added_in_rank_order_and_sent_to_all(
    dtype: torch.dtype, ranks: int, rank: int, rows: int, uses: int, kind: str
) -> None:
    parts = [torch.randn(rows, width(dtype, 250)).to(dtype) for _ in range(ranks)]
    mine = make_world(ranks, CPU, uses=uses)[rank]
    deliver(mine, parts, uses + 1)
    before = bits(parts[rank])
    total = sum_over_ranks(parts[rank], mine)
    assert bits(parts[rank]) == before
    assert bits(total) == bits(sum_in_order([part.clone() for part in parts]))
    check_sent(mine, parts[rank], uses + 1, kind)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("ranks", "rank"), [(2, 0), (3, 2)])
@pytest.mark.parametrize(("rows", "uses", "kind"), ROWS)
@pytest.mark.parametrize("words", [256, 129])
def test_the_sum_is_added_to_the_residual_and_normed(
    dtype: torch.dtype, ranks: int, rank: int, rows: int, uses: int, kind: str, words: int
) -> None:
    shape = (rows, width(dtype, words))
    parts = [torch.randn(shape).to(dtype) for _ in range(ranks)]
    residual, weight = torch.randn(shape).to(dtype), torch.randn(shape[1]).to(dtype)
    mine = make_world(ranks, CPU, uses=uses)[rank]
    deliver(mine, parts, uses + 1)
    before = bits(parts[rank]), bits(residual)
    out, total = sum_add_rms_norm(parts[rank], residual, weight, 1e-5, mine)
    assert (bits(parts[rank]), bits(residual)) == before
    summed = sum_in_order([part.clone() for part in parts])
    expected, expected_total = fused.add_rms_norm(summed, residual, weight, 1e-5)
    assert bits(total) == bits(expected_total)
    assert_near(out, expected)
    check_sent(mine, parts[rank], uses + 1, kind)


@pytest.mark.parametrize(("ranks", "rank"), [(2, 1), (3, 0)])
@pytest.mark.parametrize("shape", [(1,), (7, 33), (2, SHARE_PIECE // 2)])
def test_every_rank_gets_the_parts_of_all(ranks: int, rank: int, shape: tuple[int, ...]) -> None:
    parts = [torch.randint(-(2**62), 2**62, shape) for _ in range(ranks)]
    mine = make_world(ranks, CPU, row_words=1, uses=2)[rank]
    deliver(mine, [part.view(1, -1) for part in parts], 3)
    for kind in ("few", "many"):
        boxes_of(mine, rank, kind).zero_()
    assert torch.equal(share_with_ranks(parts[rank], mine), torch.stack(parts))
    check_sent(mine, parts[rank].view(1, -1), 3, "shared")


def test_parts_may_be_views() -> None:
    """Which way a tensor goes must not depend on how one rank happens to hold it."""
    parts = [torch.randn(3, 256) for _ in range(2)]
    mine = make_world(2, CPU, uses=0)[0]
    deliver(mine, parts, 1)
    view = torch.cat([parts[0], parts[0]], dim=1)[:, :256]
    assert not view.is_contiguous()
    assert torch.equal(sum_over_ranks(view, mine), parts[0] + parts[1])
    ids = torch.arange(14).view(7, 2)[:, 0]
    mine = make_world(2, CPU, row_words=1, uses=0)[1]
    deliver(mine, [ids.contiguous().view(1, -1) for _ in range(2)], 1)
    assert torch.equal(share_with_ranks(ids, mine), torch.stack([ids, ids]))


def test_the_numbers_of_uses_wrap_around() -> None:
    parts = [torch.randn(2, 256) for _ in range(2)]
    mine = make_world(2, CPU, few=2, uses=2**31 - 1)[0]
    deliver(mine, parts, -(2**31))
    assert torch.equal(sum_over_ranks(parts[0], mine), parts[0] + parts[1])
    assert mine.few.uses.tolist() == [-(2**31)] * 2


def test_nothing_is_sent_for_no_rows() -> None:
    mine, empty = make_world(2, CPU)[0], torch.empty(0, 256)
    assert sum_over_ranks(empty, mine).shape == (0, 256)
    assert share_with_ranks(empty, mine).shape == (2, 0, 256)
    assert sum_add_rms_norm(empty, empty, torch.ones(256), 1e-5, mine)[1].shape == (0, 256)
    assert not any(getattr(mine, kind).uses.any() for kind in KINDS)


def test_what_does_not_fit_is_refused() -> None:
    mine = make_world(2, CPU)[0]
    for x in (
        torch.zeros(10, 256),
        torch.zeros(1, 257),
        torch.zeros(1, 128),
        torch.zeros(256),
        torch.zeros(4, 301, dtype=torch.float16),
        torch.zeros(4, 128, dtype=torch.float64),
    ):
        with pytest.raises(ValueError, match="x must be"):
            sum_over_ranks(x, mine)
    with pytest.raises(ValueError, match="weight must be"):
        half = torch.ones(256, dtype=torch.float16)
        sum_add_rms_norm(torch.zeros(1, 256), torch.zeros(1, 256), half, 1e-5, mine)
    with pytest.raises(ValueError, match="x must be"):
        share_with_ranks(torch.zeros(3 * SHARE_PIECE + 1), mine)
