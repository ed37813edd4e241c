"""Writes the table of measured configurations of the NF4 products."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kernels.nf4.choice import FIELDS, WIDE_FIELDS
from kernels.nf4.few_choice import FEW_FIELDS
from kernels.nf4.tuned import FEW, TUNED, WIDE

Row = tuple[int, tuple[int, int], tuple[int, ...]]
"""Rows of x, (features, columns) of the weight, values of the configuration's fields."""


def write_table(found: list[dict[str, Any]], path: Path) -> None:
    """Write `kernels/nf4/tuned.py` anew; rows of what wasn't measured stay as they are."""
    many = [entry for entry in found if entry["m"] not in range(2, 8)]  # one row's serve up to 8
    tuned = _again(TUNED, many, "gemm", FIELDS, 8)
    wide = _again(WIDE, many, "wide", WIDE_FIELDS, 8)
    few = _again(FEW, found, "few", FEW_FIELDS, 1)
    lines = ['"""Measured configurations: written by `python -m launch.bench.tune_nf4 --table`."""']
    for name, rows, explanation in (
        ("TUNED", tuned, "`choice.FIELDS`)."),
        ("WIDE", wide, "`choice.WIDE_FIELDS`), where faster than TUNED."),
        ("FEW", few, "`few_choice.FEW_FIELDS`), where faster than both."),
    ):
        lines += ["", f"{name}: tuple[tuple[int, tuple[int, int], tuple[int, ...]], ...] = ("]
        lines += [f"    {row}," for row in sorted(rows, key=_order)]
        lines += [")", f'"""(rows, (features, columns), {explanation}"""']
    path.write_text("\n".join([*lines, ""]))


def _again(
    table: Iterable[Row],
    found: list[dict[str, Any]],
    kind: str,
    fields: tuple[str, ...],
    least: int,
) -> list[Row]:
    """A table with what was measured in place of its rows.

    TUNED always has a row, the other kernels where they were the fastest.
    """
    rows = {row[:2]: row for row in table}
    for entry in found:
        key = max(least, entry["m"]), entry["shape"]
        rows.pop(key, None)
        results = entry["results"] if kind == "gemm" else entry["results"][:1]
        best = next((result[kind] for result in results if kind in result), None)
        if best is not None:
            rows[key] = (*key, tuple(int(best[field]) for field in fields))
    return list(rows.values())


def _order(row: Row) -> tuple[int, int, int]:
    """By rows, wide inputs last, features."""
    rows, (features, columns), _ = row
    return rows, columns, features
