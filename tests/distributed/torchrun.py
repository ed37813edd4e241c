"""Starts the cases under torchrun, once a world size, and leaves no process behind."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from tests.distributed.workload import Result

ROOT = Path(__file__).resolve().parents[2]
CASES = ("-m", "tests.distributed.cases")
MARK = "DISTRIBUTED_TEST_RUN"
"""Environment variable by which a run's processes are found again: torchrun gives each rank a
session of its own, so that a process group would not hold them all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What one torchrun left."""

    world: int
    exit_code: int | None
    """None when the time limit ended it."""
    left: list[str]
    """Processes that were still there after torchrun had ended; they were killed."""
    results: dict[str, Result]
    log: str

    def result(self, name: str) -> Result:
        """Result of a case; the end of the log when the run never got that far."""
        assert name in self.results, (
            f"{name!r} has no result at {self.world} ranks (exit code {self.exit_code}, "
            f"{len(self.results)} cases done):\n{self.log[-4000:]}"
        )
        return self.results[name]


def run_cases(
    world: int, workload: Path, scratch: Path, *, timeout: float, script: Sequence[str] = CASES
) -> Run:
    """Run a workload on ``world`` ranks to its end, or to the time limit in seconds."""
    mark = uuid.uuid4().hex
    results, log = scratch / f"results.{world}.jsonl", scratch / f"log.{world}.txt"
    results.touch()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={world}", *script, str(workload), str(results)]
    fresh = {MARK: mark, "OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "0", "HF_HUB_OFFLINE": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | fresh, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            exit_code: int | None = process.wait(timeout)
        except subprocess.TimeoutExpired:
            exit_code = None
        finally:
            left = kill_marked(mark)
            process.wait(30)
    lines = results.read_bytes().splitlines()
    decoded = [msgspec.json.decode(line, type=Result) for line in lines]
    return Run(
        world=world,
        exit_code=exit_code,
        left=left,
        results={result.name: result for result in decoded},
        log=log.read_text(errors="replace"),
    )


def kill_marked(mark: str) -> list[str]:
    """Kill the processes of a run that are still there; their descriptions."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append((process, f"{process.pid} {' '.join(process.cmdline())}"))
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue  # ended meanwhile, or another user's
    for process, _ in found:
        process.kill()
    psutil.wait_procs([process for process, _ in found], timeout=30)
    return [description for _, description in found]
