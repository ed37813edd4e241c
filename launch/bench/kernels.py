"""All kernel benchmarks, or some of them, in one run.

    python launch/bench/kernels.py [--only nf4,lora,attention] [--quick]

Each family runs in a process of its own, one after the other, and checks its results before it
prints a time; the JSON lines of all are one line at the end. Exit code 1 when a check failed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[2])

from launch.bench.environment import print_json  # noqa: E402 (after the path)

CHECKOUT = Path(__file__).resolve().parents[2]
QUICK: dict[str, list[str]] = {
    "nf4": ["--rows", "1", "16", "64", "256"],
    "lora": ["--seconds", "0"],
    "attention": ["--quick"],
}
"""Families, and their options for a run that tries no other configurations."""


def families(text: str) -> list[str]:
    """The families of a list such as ``nf4,lora``.

    Raises:
        argparse.ArgumentTypeError: one is unknown.
    """
    names = text.split(",")
    if unknown := [name for name in names if name not in QUICK]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(QUICK)}")
    return names


def run(module: str, options: Sequence[str]) -> tuple[int, dict[str, Any] | None]:
    """Run a benchmark, passing on what it prints; its exit code and the results it ended with."""
    command = [sys.executable, "-m", module, *options]
    results = None
    with subprocess.Popen(command, cwd=CHECKOUT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith('{"benchmark"'):
                results = json.loads(line)
            else:
                print(line, end="", flush=True)
    return process.returncode, results


def main() -> int:
    """Run the families; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only",
        type=families,
        default=list(QUICK),
        metavar="FAMILY,FAMILY",
        help="families to measure; default: all",
    )
    parser.add_argument("--quick", action="store_true", help="no configurations besides the chosen")
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    for name in arguments.only:
        options = QUICK[name] if arguments.quick else []
        code, found = run(f"launch.bench.kernels_{name}", options)
        kept = {key: value for key, value in (found or {}).items() if key != "environment"}
        results[name] = {"exit_code": code, **kept}
    print_json("kernels", results)
    return max(1 if each["exit_code"] else 0 for each in results.values())


if __name__ == "__main__":
    sys.exit(main())
