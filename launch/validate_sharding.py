"""Compare what every rank holds and computes with the unsharded model.

torchrun --nproc-per-node N launch/validate_sharding.py --model DIR --lora NAME=DIR ...
python launch/validate_sharding.py --model DIR
"""

import os
import sys
from pathlib import Path

# A script's own folder stands first on the path; the packages are beside it.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from launch.packages import check_kernels_package  # noqa: E402 (after the path)
from launch.validation.options import read_options  # noqa: E402


def main() -> int:
    """Read the options, then become a rank; the exit code."""
    options = read_options()
    check_kernels_package()
    # Read by OpenMP when torch is imported: threads that spin for work would take a whole core
    # from the other ranks of this host.
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    os.environ.setdefault("OMP_NUM_THREADS", str(options.engine.cpu_threads))
    from launch.validation.run import run_rank

    return run_rank(options)


if __name__ == "__main__":
    sys.exit(main())
