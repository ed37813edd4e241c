"""Sums over the ranks of one host whose GPUs write into each other's memory.

Legend: T rows, D hidden size, N ranks; words are 32 bits: one float32 or two neighbouring 16-bit
values.
"""

from dataclasses import dataclass

from torch import Tensor

SHARE_PIECE = 512
"""Words of a program that shares what is not made of rows."""
SHARED_BYTES, STAMPED_BYTES, SIGNALLED_BYTES = 2**17, 2**20, 2**24
"""Most bytes that a rank sends to the others at a time: what is shared; sums of stamped words,
which are faster up to there on two H200; sums with a signal for each row. nccl serves beyond."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Stamped:
    """Mailboxes whose words carry the number of their use."""

    by_rank: tuple[Tensor, ...]
    """int64 [programs * 2 * N * piece] of each rank, at this rank's addresses; zero at first."""
    uses: Tensor
    """int32 [programs] of this rank: how often its mailboxes have been used; zero at first."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Signalled:
    """Mailboxes of plain words; a signal says that they are there."""

    by_rank: tuple[Tensor, ...]
    """int32 [programs * 2 * N * piece] of each rank."""
    signals: tuple[Tensor, ...]
    """int32 [programs * 2 * N] of each rank: number of each mailbox's last use; zero at first."""
    uses: Tensor
    """int32 [programs] of this rank; zero at first."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Mailboxes:
    """Where this rank finds the others' pieces and leaves its own."""

    rank: int
    row_words: int
    """Words of a row, up to the next power of two: the pieces of sums."""
    few: Stamped
    """For sums of few rows."""
    many: Signalled
    """For sums of more."""
    shared: Stamped
    """For anything else; its pieces have `SHARE_PIECE` words."""

    def hold_rows(self, x: Tensor) -> bool:
        """Whether the sum of a tensor [T, D] can travel through them: by its shape and type alone,
        which are equal on all ranks."""
        if x.ndim != 2 or x.shape[0] > self.many.uses.shape[0]:
            return False
        size = x.shape[1] * x.element_size()
        return size % 4 == 0 and self.row_words // 2 < size // 4 <= self.row_words

    def share(self, x: Tensor) -> bool:
        """Whether a tensor is short enough to be shared: by its size alone."""
        size = x.numel() * x.element_size()
        return size % 4 == 0 and size <= 4 * SHARE_PIECE * self.shared.uses.shape[0]


def programs(ranks: int, limit: int, piece: int) -> int:
    """Programs of the longest message when a rank may send ``limit`` bytes to the others."""
    return max(1, limit // (ranks - 1) // (4 * piece))


__all__ = [
    "SHARED_BYTES",
    "SHARE_PIECE",
    "SIGNALLED_BYTES",
    "STAMPED_BYTES",
    "Mailboxes",
    "Signalled",
    "Stamped",
    "programs",
]
