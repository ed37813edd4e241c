"""Test files in processes of their own, beside all other tests.

They take minutes of a core and wait for nothing, whereas tests that start services wait for most of
their time. So they begin with the session, at the lowest priority, as many at a time as there are
cores (four at most), and are looked at when all other tests are through.

    python -m tests.kernels.beside DIRECTORY NAME...
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

HERE = Path(__file__).parent
ENVIRONMENTS = {"interpreted": {"TRITON_INTERPRET": "1"}, "compiled": {}}
"""What the files of a folder need."""
NAMES = [
    f"{folder}/{path.name}"
    for folder in ENVIRONMENTS
    for path in sorted((HERE / folder).glob("test_*.py"))
]
AT_ONCE = min(4, os.cpu_count() or 1)
"""A process takes half a gigabyte."""
LOOK_SECONDS = 0.2


class Beside:
    """The process that runs the files, and what it has written of them."""

    def __init__(self, directory: Path, names: Sequence[str]) -> None:
        """Start the first of ``names``; the others follow."""
        self._directory = directory
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.kernels.beside", str(directory), *names],
            cwd=HERE.parents[1],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    def result(self, name: str) -> tuple[int, str]:
        """Wait for the end of a file: the exit code and the words of its pytest."""
        ended = False
        while (code := _read_code(self._directory, name)) is None:
            assert not ended, f"{name} was not run to its end"
            time.sleep(LOOK_SECONDS)
            ended = self._process.poll() is not None
        return code, _path(self._directory, name, "log").read_text("utf-8", "replace")

    def close(self) -> None:
        """End what still runs."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def run_files(directory: Path, names: Sequence[str]) -> None:
    """Run the files to their ends, or to the end of the process that asked for them."""
    parent, waiting = os.getppid(), list(names)
    running: dict[str, subprocess.Popen[bytes]] = {}
    while (waiting or running) and os.getppid() == parent:
        while waiting and len(running) < AT_ONCE:
            name = waiting.pop(0)
            running[name] = _start(directory, name)
        for name, process in list(running.items()):
            if process.poll() is not None:
                _write_code(directory, name, process.returncode)
                del running[name]
        time.sleep(LOOK_SECONDS)
    for process in running.values():
        process.kill()


def _start(directory: Path, name: str) -> subprocess.Popen[bytes]:
    own = ENVIRONMENTS[name.partition("/")[0]]
    with _path(directory, name, "log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", HERE / name],
            env={**os.environ, "OMP_NUM_THREADS": "1", **own},
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def _path(directory: Path, name: str, kind: str) -> Path:
    return directory / f"{name.replace('/', '.')}.{kind}"


def _read_code(directory: Path, name: str) -> int | None:
    try:
        return int(_path(directory, name, "code").read_text())
    except FileNotFoundError:
        return None


def _write_code(directory: Path, name: str, code: int) -> None:
    written = _path(directory, name, "new")
    written.write_text(str(code))
    written.rename(_path(directory, name, "code"))  # whole, or not there


def give_way() -> None:
    """Take what cores nobody else wants. Linux may share them out by session first, and by the
    priorities of processes only within one: the session's own is lowered too."""
    os.nice(19)
    with suppress(OSError):  # a system that does not group by session
        Path("/proc/self/autogroup").write_text("19")


if __name__ == "__main__":
    give_way()
    run_files(Path(sys.argv[1]), sys.argv[2:])
