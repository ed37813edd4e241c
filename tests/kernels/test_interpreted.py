"""Runs the Triton kernels' tests under Triton's interpreter, each file in a process of its own, as
many at a time as there are cores."""

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FILES = sorted(path.name for path in (HERE / "interpreted").glob("test_*.py"))
TIMEOUT = 560.0
"""Seconds for one file."""

Run = subprocess.CompletedProcess[str]


def interpret(name: str) -> Run:
    """Run one file to its end."""
    path = HERE / "interpreted" / name
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", path],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[Run]]]:
    """The runs of the files that were asked for, in the order of the tests."""
    wanted = [
        item.callspec.params["name"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.module is request.module
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield {name: pool.submit(interpret, name) for name in wanted}
        pool.shutdown(cancel_futures=True)


@pytest.mark.timeout(len(FILES) * TIMEOUT)
@pytest.mark.parametrize("name", FILES)
def test_interpreted(name: str, runs: dict[str, Future[Run]]) -> None:
    run = runs[name].result()
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
