"""Run a soak and report it.

python -m tests.soak --minutes 30 --ranks 2
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.soak.options import SoakOptions
from tests.soak.report import report_lines
from tests.soak.run import run_soak


def main() -> int:
    """Print what was seen; 1 if anything was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--adapters", type=int, default=300)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    options = SoakOptions(
        seconds=given.minutes * 60,
        ranks=given.ranks,
        adapters=given.adapters,
        clients=given.clients,
        seed=given.seed,
    )
    with tempfile.TemporaryDirectory(prefix="soak-") as directory:
        report = run_soak(options, Path(directory))
    print("\n".join(report_lines(report)))
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
