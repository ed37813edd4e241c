"""The tables of ``launch/bench/multigpu.py``, from what its parts found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def sums_table(found: Mapping[str, Any]) -> str:
    """µs of one sum: a line a method, a column a number of rows."""
    methods = found.get("us", {})
    rows = sorted({int(row) for times in methods.values() for row in times})
    lines = [f"{'rows':16}" + "".join(f"{row:>8}" for row in rows)]
    for name, times in methods.items():
        by_row = {int(row): took for row, took in times.items()}
        lines.append(f"{name:16}" + "".join(f"{by_row.get(row, '-'):>8}" for row in rows))
    floors = [floor_us(found, row) for row in rows]
    lines.append(f"{'link alone':16}" + "".join(f"{floor:8.1f}" for floor in floors))
    return "\n".join([*lines, f"a copy to a peer: {found.get('link_GB_per_s', '?')} GB/s"])


def floor_us(found: Mapping[str, Any], rows: int) -> float:
    """What the link needs for the bytes of one bfloat16 sum: 2 (N - 1) / N of them each way."""
    ranks, rate = found.get("ranks", 1), found.get("link_GB_per_s")
    size = rows * found.get("hidden", 0) * 2
    return 2 * (ranks - 1) / ranks * size / rate / 1000 if rate else float("nan")


def checks_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line a model and type."""
    return "\n".join(
        f"{row['model']:32}{row['dtype']:10}{'ok' if row['ok'] else 'DIFFERS':8}{row['seconds']} s"
        for row in rows
    )


def speed_table(found: Mapping[str, Any], ranks: int) -> str:
    """A line a model and case: one rank, all ranks, and the efficiency of the scaling."""
    models = dict.fromkeys(label.rsplit(" on ", 1)[0] for label in found if " on " in label)
    lines = [f"{'model, case':28}{'1 rank':>10}{f'{ranks} ranks':>10}{'speedup':>9}{'of ideal':>9}"]
    for model in models:
        one, all_ = (found.get(f"{model} on {n}", {}) for n in (1, ranks))
        for kind, unit in (("decode_ms", "ms"), ("prefill", "tokens/s")):
            for case, after in all_.get(kind, {}).items():
                before = one.get(kind, {}).get(case)
                lines.append(_speed_line(f"{model} {case} {unit}", before, after, ranks))
    return "\n".join(lines)


def _speed_line(name: str, before: float | None, after: float, ranks: int) -> str:
    if before is None:
        return f"{name:28}{'-':>10}{after:10}"
    gain = before / after if name.endswith(" ms") else after / before
    return f"{name:28}{before:10}{after:10}{gain:9.2f}{gain / ranks:9.2f}"


def share_table(found: Mapping[str, Any], ranks: int) -> str:
    """What share of a decode step the sums take, and how long that is for each of them."""
    lines = [f"{'model, case':28}{'step, ms':>10}{'sums, ms':>10}{'share':>8}"]
    for label, without in found.items():
        model, _, kind = label.partition(" without ")
        if kind != "sums":
            continue
        steps = found.get(f"{model} on {ranks}", {}).get("decode_ms", {})
        for case, rest in without.get("decode_ms", {}).items():
            if case in steps:
                sums = steps[case] - rest
                share = sums / steps[case]
                lines.append(f"{f'{model} {case}':28}{steps[case]:10}{sums:10.3f}{share:8.1%}")
    return "\n".join(lines)
