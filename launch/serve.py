"""Serve a base model and its adapters over HTTP.

torchrun --nproc-per-node N launch/serve.py --model DIR_OR_HUB_ID --lora NAME=DIR ...
python launch/serve.py --model DIR_OR_HUB_ID
"""

import os
import signal
import sys
from pathlib import Path

# A script's own folder stands first on the path; the packages are beside it.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from launch.options import read_options_or_exit  # noqa: E402 (after the path)
from launch.packages import check_kernels_package  # noqa: E402


def main() -> int:
    """Read the options, then become a rank; the exit code."""
    parent = os.getppid()  # now: who asks only after the imports may miss that it has ended
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Until it serves, Ctrl-C ends the process as SIGTERM does: an exception would wait for
        # the native code that loads or connects.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    options = read_options_or_exit()
    check_kernels_package()
    # Read by OpenMP when torch is imported: threads that spin for work would take a whole core
    # from the other ranks of this host.
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    os.environ.setdefault("OMP_NUM_THREADS", str(options.config.engine.cpu_threads))
    from launch.serving import run_rank

    return run_rank(options, parent)


if __name__ == "__main__":
    sys.exit(main())
