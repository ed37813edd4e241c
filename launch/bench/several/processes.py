"""Starts programs on several ranks and lets none outlive its time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """What a program left."""

    code: int | None
    """Its exit code; None when its time was over."""
    seconds: float
    output: str
    """All that it printed."""

    def json(self) -> dict[str, Any]:
        """The last line of the output that is a JSON object; empty without one."""
        for line in reversed(self.output.splitlines()):
            if line.startswith("{"):
                with suppress(ValueError):
                    found: dict[str, Any] = json.loads(line)
                    return found
        return {}


def torchrun(ranks: int, *program: str) -> list[str]:
    """The command that runs a program on ``ranks`` ranks; one rank needs no torchrun."""
    if ranks == 1 and program[0] != "-m":
        return [sys.executable, *program]
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*start, f"--nproc-per-node={ranks}", *program]


def start(command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """Start a command in the checkout; its output goes to a file."""
    fresh = {"OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "0", "PYTHONUNBUFFERED": "1"}
    fresh["PYTHONPATH"] = os.pathsep.join([str(ROOT), *_python_path()])
    with log.open("wb") as output:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | fresh,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def run(command: Sequence[str], log: Path, limit: float) -> Done:
    """Run a command to its end, or for ``limit`` seconds."""
    began = time.monotonic()
    process = start(command, log)
    try:
        code: int | None = process.wait(limit)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        end(process)
    seconds = time.monotonic() - began
    return Done(code=code, seconds=seconds, output=log.read_text("utf-8", "replace"))


def tree(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """A process and all its descendants that still run."""
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(process.pid)
        return [root, *root.children(recursive=True)]
    return []


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of a process and its descendants."""
    for each in tree(process):
        with suppress(psutil.NoSuchProcess):
            each.kill()
    process.wait()


def _python_path() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
