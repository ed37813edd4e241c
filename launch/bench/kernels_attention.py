"""Paged attention and the small ops on one GPU, at the shapes of Llama-3.1-8B.

    python launch/bench/kernels_attention.py [--quick]

Checks come first, in bfloat16 against the reference; a part whose check fails prints no speed and
makes the exit code 1. Times are of CUDA graphs that hold many launches over memory beyond the L2
cache, divided by the launches: the time that a launch adds to a captured step. Needs torch, triton
and numpy alone. The last line is JSON.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from launch.bench.attention.checks import run_checks
from launch.bench.attention.decode import decode_table
from launch.bench.attention.prefill import prefill_table
from launch.bench.attention.small import small_table
from launch.bench.environment import print_json
from launch.bench.graphs import read_ceiling


def main() -> int:
    """Run all parts; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="only the tile sizes in use")
    every_tile = not parser.parse_args().quick
    torch.manual_seed(0)
    ceiling = read_ceiling()
    print(f"read ceiling {ceiling:.2f} TB/s (a large sum)")
    failures = run_checks()
    results: dict[str, Any] = {"read_ceiling_tb_s": round(ceiling, 3), "failed_checks": failures}
    for part, table in (
        ("decode", decode_table),
        ("prefill", prefill_table),
        ("small", small_table),
    ):
        if any(name.startswith(part) for name in failures):
            print(f"{part}: a check failed, no times")
            continue
        try:
            results[part] = table(every_tile)
        except Exception:  # the other parts are still worth their device time
            traceback.print_exc()
            failures.append(part)
    print_json("kernels_attention", results)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
