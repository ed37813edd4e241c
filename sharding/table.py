"""The cut of a model as a table for people."""

from collections.abc import Sequence

from sharding.cut import RankCut

__all__ = ["cut_table"]


def cut_table(cuts: Sequence[RankCut]) -> str:
    """One line a rank: query heads, KV heads and MLP columns a layer, and vocabulary rows.

    Where sizes differ from layer to layer, the least and the greatest are given.
    """
    rows = [("rank", "q heads", "kv heads", "mlp columns", "vocabulary rows")]
    for cut in cuts:
        rows.append(
            (
                str(cut.rank),
                _range(cut.q_heads),
                _range(cut.kv_heads),
                _range(cut.mlp_widths),
                f"{cut.vocab.size} [{cut.vocab.start}:{cut.vocab.stop}]",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )


def _range(sizes: Sequence[int]) -> str:
    """``least-greatest``, or the one size."""
    low, high = min(sizes), max(sizes)
    return str(low) if low == high else f"{low}-{high}"
