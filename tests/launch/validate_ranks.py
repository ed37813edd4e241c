"""Runs ``validate_sharding`` several times in the ranks of one torchrun, to save their start-up.

Usage: validate_ranks.py FILE, with JSON [{"argv": [...], "damage": null | [rank, part of a name]}].
With ``damage`` the first element of the first tensor so named is damaged on that rank once the
model is loaded. Writes the codes of all runs to FILE.RANK.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[2])

from launch.validation import run  # noqa: E402 (after the path)
from launch.validation.options import read_options  # noqa: E402

honest = run._entries


def damaging(rank: int, name: str) -> Any:
    """As the original, on damaged memory."""

    def entries(loaded: Any, registry: Any, checkpoint: Any) -> Any:
        found = honest(loaded, registry, checkpoint)
        if loaded.rank.comm.rank == rank:
            next(entry for entry in found if name in entry.name).live.cell(0, 0).flip(0)
        return found

    return entries


def main() -> int:
    """The last run's code."""
    codes = []
    for job in json.loads(Path(sys.argv[1]).read_text()):
        run._entries = damaging(*job["damage"]) if job["damage"] else honest
        codes.append(run.run_rank(read_options(job["argv"])))
    Path(f"{sys.argv[1]}.{os.environ['RANK']}").write_text(json.dumps(codes))
    return codes[-1]


if __name__ == "__main__":
    sys.exit(main())
