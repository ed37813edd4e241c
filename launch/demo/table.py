"""Answers side by side, one column a model."""

import textwrap
from collections.abc import Sequence
from itertools import zip_longest

from launch.demo.batch import Answer

__all__ = ["render"]

GAP = "  "
NARROWEST = 16


def render(answers: Sequence[Answer], problems: Sequence[str | None], width: int) -> str:
    """A table of the answers, their speed and their verdicts, `width` characters wide.

    `problems` holds one entry an answer: what is wrong with it, or None.
    """
    column = max(NARROWEST, (width + len(GAP)) // len(answers) - len(GAP))
    rule = ["─" * column] * len(answers)
    texts = [_wrap(answer.error or answer.text, column) for answer in answers]
    speeds = [f"{a.tokens} tokens, {a.tokens_per_second:.1f}/s" for a in answers]
    verdicts = [_wrap(f"FAILED: {p}" if p else "ok", column) for p in problems]
    rows = [
        [answer.model for answer in answers],
        rule,
        *zip_longest(*texts, fillvalue=""),
        rule,
        speeds,
        *zip_longest(*verdicts, fillvalue=""),
    ]
    return "\n".join(GAP.join(cell.ljust(column) for cell in row).rstrip() for row in rows)


def _wrap(text: str, width: int) -> list[str]:
    lines = [piece for line in text.splitlines() for piece in textwrap.wrap(line, width) or [""]]
    return lines or ["(no text)"]
