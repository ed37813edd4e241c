"""Everything that takes several GPUs, in one command: are the ranks right, and how fast are they.

    python launch/bench/multigpu.py [--ranks N] [--only PART ...] [--quick]

Parts, each with a time limit of its own, nine minutes in all:

    sums    the sum over ranks: µs by rows and method, the link's rate
    checks  the sharding validator on uneven cuts, plain and NF4, adapters of mixed LoRA ranks;
            tokens of a mixed batch equal those of world size 1
    killed  a rank of a service is killed, then one stopped: who is told, and when it ends
    speed   decode steps and prefill at the shapes of large models on 1 and N ranks, and how well
            that scales
    loads   adapters loaded into a running service, one by one and all at once, on 1 and N ranks
    tests   the kernels' tests on a GPU

A part that fails does not keep the others from running; then the exit code is 1. The last line of
the output is one JSON object. On a machine without GPUs, ``--device cpu`` runs checks and killed.
"""

from __future__ import annotations

import argparse
import importlib.util
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[2])

from launch.bench.environment import print_json  # noqa: E402 (after the path)
from launch.bench.several.killed import lose_a_rank  # noqa: E402
from launch.bench.several.processes import ROOT, Done, run, torchrun  # noqa: E402
from launch.bench.several.table import checks_table, share_table, speed_table, sums_table  # noqa: E402

TOTAL_SECONDS = 540.0
CASES = "1x0,32x0,256x0,1x1,32x32,256x64"
BASE_CASES = "1x0,32x0,256x0"
"""Decode steps: rows and adapters."""
WORK: dict[str, tuple[str, list[str]]] = {
    "8B bf16": ("llama-3.1-8b", []),
    "8B NF4": ("llama-3.1-8b", ["--quantize", "nf4"]),
    "70B NF4": ("llama-3.1-70b", ["--quantize", "nf4"]),
}
"""Shapes and options of each model."""


class Bench:
    """The parts, and where their files and logs are."""

    def __init__(self, given: argparse.Namespace, scratch: Path) -> None:
        self._given = given
        self._scratch = scratch
        self._deadline = time.monotonic() + TOTAL_SECONDS
        self.failed: list[str] = []

    def sums(self) -> dict[str, Any]:
        """Time of one sum."""
        rows = ["1", "32", "256", "2048"] if self._given.quick else []
        options = ["--rows", *rows] if rows else []
        done = self._ranks("sums", 60, "-m", "launch.bench.several.sums", *options)
        results = done.json()
        self._require("sums", done.code == 0 and not results.get("wrong", ["no result"]), done)
        print(sums_table(results))
        return results

    def checks(self) -> dict[str, Any]:
        """Sharding, tensor by tensor and token by token."""
        models = self._scratch / "checks"
        models.mkdir()
        options = ["--models", "9 heads in 3 groups, plain", "28 heads in 4 groups, NF4"]
        options = options if self._given.quick else []
        options += [f"--device={self._given.device}", f"--backend={self._given.backend}"]
        program = ("-m", "launch.bench.several.checks", str(models), *options)
        done = self._ranks("checks", 100, *program)
        rows = done.json().get("checks", [])
        self._require("checks", bool(rows) and all(row["ok"] for row in rows), done)
        print(checks_table(rows))
        return {"rows": rows}

    def killed(self) -> dict[str, Any]:
        """A rank lost."""
        found = {}
        for how in (signal.SIGKILL, signal.SIGSTOP):
            options = [f"--device={self._given.device}", f"--backend={self._given.backend}"]
            options += ["--arena-bytes=256MiB"]
            scratch = self._scratch / "killed"
            scratch.mkdir(exist_ok=True)
            found[how.name] = lose_a_rank(self._given.ranks, scratch, how, options)
            print(f"{how.name:10}{found[how.name]}")
            if not found[how.name]["ok"]:
                self.failed.append(f"killed: {how.name}")
        return found

    def loads(self) -> dict[str, Any]:
        """Cold adapters, on one rank and on all."""
        found: dict[str, Any] = {}
        for ranks in (1, self._given.ranks):
            program = ("-m", "launch.bench.several.loads", f"--ranks={ranks}", "--quantize=nf4")
            done = self._run(f"loads on {ranks}", 60, [sys.executable, *program])
            self._require(f"loads on {ranks}", done.code == 0, done)
            found[f"on {ranks}"] = done.json()
            print(f"on {ranks}: {found[f'on {ranks}']}")
        return found

    def speed(self) -> dict[str, Any]:
        """Decode and prefill on one rank and on all."""
        found: dict[str, Any] = {}
        for name, (shapes, options) in WORK.items():
            if self._given.quick and shapes != "llama-3.1-8b":
                continue
            decode = ["--decode", CASES]
            prefill = ["--prefill", "0", "32"] if not self._given.quick else []
            for ranks in (1, self._given.ranks):
                program = ("-m", "launch.bench.several.speed", f"--shapes={shapes}", *options)
                label = f"{name} on {ranks}"
                done = self._ranks(label, 100, *program, *decode, *prefill, ranks=ranks)
                self._require(label, done.code == 0, done)
                found[label] = done.json()
            if shapes == "llama-3.1-8b":
                program = (*program, "--decode", BASE_CASES, "--no-sums")
                label = f"{name} without sums"
                done = self._ranks(label, 60, *program)
                self._require(label, done.code == 0, done)
                found[label] = done.json()
        print(speed_table(found, self._given.ranks))
        print(share_table(found, self._given.ranks))
        return found

    def tests(self) -> dict[str, Any]:
        """What pytest has for a GPU and needs no other library."""
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
        command += ["-n", "8"] if importlib.util.find_spec("xdist") is not None else []
        done = self._run("tests", 120, [*command, "tests/kernels"])
        summary = done.output.strip().splitlines()[-1:]
        self._require("tests", done.code == 0, done)
        print(*summary)
        return {"summary": summary, "seconds": round(done.seconds, 1)}

    def _ranks(self, name: str, limit: float, *program: str, ranks: int | None = None) -> Done:
        return self._run(name, limit, torchrun(ranks or self._given.ranks, *program))

    def _run(self, name: str, limit: float, command: list[str]) -> Done:
        """Run a program for ``limit`` seconds at most, and not past the end of all time."""
        left = max(1.0, self._deadline - time.monotonic())
        return run(command, self._scratch / f"{name.replace(' ', '-')}.log", min(limit, left))

    def _require(self, name: str, ok: bool, done: Done) -> None:
        """Note a part that failed, and show the end of what it printed."""
        if not ok:
            how = "its time was over" if done.code is None else f"exit code {done.code}"
            self.failed.append(f"{name}: {how}")
            print(f"{name} failed, {how}:\n{done.output[-3000:]}", file=sys.stderr)


PARTS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "sums": Bench.sums,
    "checks": Bench.checks,
    "killed": Bench.killed,
    "speed": Bench.speed,
    "loads": Bench.loads,
    "tests": Bench.tests,
}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, help="default: the visible GPUs")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), help="default: all")
    parser.add_argument("--quick", action="store_true", help="fewer sizes, models and cases")
    parser.add_argument(
        "--device",
        choices=["auto", "cpu"],
        default="auto",
        help="cpu: the same checks with gloo (%(default)s)",
    )
    parser.add_argument(
        "--backend",
        choices=["auto", "gloo"],
        default="auto",
        help="gloo: ranks may share a GPU (%(default)s)",
    )
    given = parser.parse_args(argv)
    possible = list(PARTS) if given.device == "auto" else ["checks", "killed"]
    given.only = given.only or possible
    if not set(given.only) <= set(possible):
        parser.error(f"argument --only: on the CPU there are {' and '.join(possible)}")
    if given.ranks is None:
        import torch

        given.ranks = torch.cuda.device_count()
    if given.ranks < 2:
        parser.error("argument --ranks: at least 2; one rank has nobody to share with")
    return given


def main() -> int:
    """Run the parts; 0 when all of them are well."""
    given = parse()
    # As an exception, so that whatever runs is ended on the way out.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(given, Path(scratch))
        for name in given.only:
            print(f"== {name}", flush=True)
            results[name] = PARTS[name](bench)
    print(f"failed: {bench.failed or 'nothing'}")
    print_json("multigpu", {"ranks": given.ranks, "failed": bench.failed, **results})
    return 1 if bench.failed else 0


if __name__ == "__main__":
    assert Path(sys.path[0]) == ROOT
    sys.exit(main())
