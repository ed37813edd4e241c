"""Mailboxes of several ranks in one process, and one rank's as the others would have filled it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.reduce import SHARE_PIECE, Mailboxes, Signalled, Stamped

KINDS = ("few", "many", "shared")


def make_world(
    ranks: int,
    device: torch.device,
    *,
    row_words: int = 256,
    few: int = 5,
    many: int = 9,
    shared: int = 3,
    uses: int = 0,
) -> list[Mailboxes]:
    """Of every rank, on one device.

    Args:
        row_words: most words of a row, a power of two.
        few: rows of the longest stamped sum.
        many: of the longest signalled one.
        shared: programs of the longest message of another kind.
        uses: how often each mailbox has been used before.
    """

    def all_ranks(words: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        return tuple(torch.zeros(words, dtype=dtype, device=device) for _ in range(ranks))

    def counts(programs: int) -> Tensor:
        return torch.full((programs,), uses, dtype=torch.int32, device=device)

    stamped = all_ranks(few * 2 * ranks * row_words, torch.int64)
    plain = all_ranks(many * 2 * ranks * row_words, torch.int32)
    signals = all_ranks(many * 2 * ranks, torch.int32)
    others = all_ranks(shared * 2 * ranks * SHARE_PIECE, torch.int64)
    return [
        Mailboxes(
            rank=rank,
            row_words=row_words,
            few=Stamped(by_rank=stamped, uses=counts(few)),
            many=Signalled(by_rank=plain, signals=signals, uses=counts(many)),
            shared=Stamped(by_rank=others, uses=counts(shared)),
        )
        for rank in range(ranks)
    ]


def boxes_of(mine: Mailboxes, owner: int, kind: str) -> Tensor:
    """A rank's mailboxes of a kind as [programs, 2, sender, piece]."""
    boxes: Stamped | Signalled = getattr(mine, kind)
    return boxes.by_rank[owner].view(boxes.uses.shape[0], 2, len(boxes.by_rank), -1)


def pieces(x: Tensor, use: int, kind: str, piece: int) -> Tensor:
    """What a sender writes into mailboxes of a kind: [programs, piece], zero where nothing is."""
    words = x.view(-1).view(torch.int32)
    if kind != "many":
        words = (words.to(torch.int64) & 0xFFFFFFFF) | (use << 32)
    if kind != "shared":
        words = words.view(x.shape[0], -1)
        return torch.nn.functional.pad(words, (0, piece - words.shape[1]))
    return torch.nn.functional.pad(words, (0, -words.numel() % piece)).view(-1, piece)


def deliver(mine: Mailboxes, parts: Sequence[Tensor], use: int) -> None:
    """Fill a rank's mailboxes of all kinds with as much as they hold of the others' parts."""
    for sender, part in enumerate(parts):
        if sender == mine.rank:
            continue
        for kind in KINDS:
            target = boxes_of(mine, mine.rank, kind)[:, use & 1, sender]
            if kind != "shared" and part.shape[1] * part.element_size() // 4 > target.shape[1]:
                continue
            sent = pieces(part.cpu(), use, kind, target.shape[1])[: target.shape[0]]
            target[: sent.shape[0]] = sent.to(target.device)
        signals = mine.many.signals[mine.rank].view(-1, 2, len(parts))
        signals[:, use & 1, sender] = use
