"""Tables and plots of benchmark results.

    python launch/bench/report.py before.jsonl after.jsonl [--plots DIR]

A file holds what benchmarks printed; lines that are no results are skipped. For each benchmark one
Markdown table is printed: a line a figure, a column a run, and the last run over the first where
there are several. ``--plots`` draws the same as bars (needs matplotlib, the extra ``bench``).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KEYS = ("benchmark", "environment")
SHOWN = 40
"""Most figures in a plot."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One benchmark's figures by name."""

    benchmark: str
    label: str
    """Its file, and its number there if it is not the only one of its benchmark."""
    figures: dict[str, float]


def figures(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """Every number in a result with the path to it.

    Entries of a list are named by their texts and whole numbers: ``{"shape": "o", "rows": 4,
    "us": 7.6}`` is the figure ``o 4 us``.
    """
    if isinstance(value, bool) or value is None:
        return
    if isinstance(value, (int, float)):
        yield name, float(value)
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from figures(inner, f"{name} {key}".strip())
    elif isinstance(value, list) and all(isinstance(entry, dict) for entry in value):
        for entry in value:
            named = {k: v for k, v in entry.items() if isinstance(v, (str, int))}
            title = " ".join(str(each) for each in named.values())
            rest = {key: inner for key, inner in entry.items() if key not in named}
            yield from figures(rest, f"{name} {title}".strip())


def read(path: Path) -> list[Run]:
    """The results in a file.

    Raises:
        ValueError: it has none.
    """
    lines = path.read_text("utf-8").splitlines()
    found = [json.loads(line) for line in lines if line.startswith('{"benchmark"')]
    if not found:
        raise ValueError(f"{path} holds no results of a benchmark")
    names = [str(each["benchmark"]) for each in found]
    return [
        Run(
            benchmark=name,
            label=path.stem if names.count(name) == 1 else f"{path.stem} {number + 1}",
            figures=dict(figures({k: v for k, v in each.items() if k not in KEYS})),
        )
        for number, (name, each) in enumerate(zip(names, found, strict=True))
    ]


def table(runs: Sequence[Run]) -> str:
    """The Markdown table of one benchmark's runs."""
    several = len(runs) > 1
    head = ["figure", *(run.label for run in runs), *(["last / first"] if several else [])]
    lines = [_row(head), _row(["---"] * len(head))]
    for name in _names(runs):
        values = [run.figures.get(name) for run in runs]
        cells = ["" if value is None else f"{value:,.5g}" for value in values]
        if several:
            first, last = values[0], values[-1]
            cells.append(f"{last / first:.3f}" if first and last is not None else "")
        lines.append(_row([name, *cells]))
    return "\n".join(lines)


def plot(runs: Sequence[Run], path: Path) -> None:
    """Bars of one benchmark's figures, a panel for each kind (the last word of the name)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    kinds: dict[str, list[str]] = {}
    for name in _names(runs)[:SHOWN]:
        kinds.setdefault(name.split()[-1], []).append(name)
    height = sum(len(names) * len(runs) for names in kinds.values()) * 0.25 + len(kinds)
    ratios = [len(names) for names in kinds.values()]
    figure, axes = pyplot.subplots(
        len(kinds), 1, figsize=(9, height), squeeze=False, height_ratios=ratios
    )
    for (kind, names), axis in zip(kinds.items(), axes[:, 0], strict=True):
        for number, run in enumerate(runs):
            places = [i + 0.8 * number / len(runs) for i in range(len(names))]
            values = [run.figures.get(name, 0.0) for name in names]
            axis.barh(places, values, height=0.8 / len(runs), label=run.label)
        axis.set_yticks(range(len(names)), [name.rsplit(kind, 1)[0] or kind for name in names])
        axis.invert_yaxis()
        axis.set_xlabel(kind)
    axes[0, 0].legend()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def _names(runs: Sequence[Run]) -> list[str]:
    return list(dict.fromkeys(name for run in runs for name in run.figures))


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main(argv: Sequence[str] | None = None) -> None:
    """Print the tables; draw the plots."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--plots", type=Path, metavar="DIR")
    arguments = parser.parse_args(argv)
    groups: dict[str, list[Run]] = {}
    try:
        for path in arguments.files:
            for run in read(path):
                groups.setdefault(run.benchmark, []).append(run)
    except (OSError, ValueError) as error:
        sys.exit(f"report.py: {error}")
    for benchmark, runs in groups.items():
        print(f"## {benchmark}\n\n{table(runs)}\n")
        if arguments.plots is not None:
            arguments.plots.mkdir(parents=True, exist_ok=True)
            plot(runs, arguments.plots / f"{benchmark}.png")


if __name__ == "__main__":
    main()
