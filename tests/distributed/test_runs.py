"""Every run ends well, and every case leaves the engine as it should be."""

import os
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.distributed.material import WORLDS, Material
from tests.distributed.torchrun import Run, run_cases
from tests.distributed.workload import Result


@pytest.mark.parametrize("world", WORLDS)
def test_all_ranks_leave_by_themselves(
    material: Material, run: Callable[[int], Run], world: int
) -> None:
    done = run(world)
    assert done.exit_code == 0, done.log[-4000:]
    assert done.left == []
    wanted = [name for name, case in material.cases.items() if world in case.worlds]
    assert list(done.results) == wanted


@pytest.mark.parametrize("world", WORLDS)
def test_nothing_is_leaked_after_any_case(run: Callable[[int], Run], world: int) -> None:
    faults = {name: leaks(result) for name, result in run(world).results.items()}
    assert faults
    assert {name: found for name, found in faults.items() if found} == {}


def leaks(result: Result) -> list[str]:
    """What a case left behind with nothing open."""
    found = list(result.faults)
    gauges = result.gauges
    for name in ("num_requests_running", "num_requests_waiting", "pages_kv", "integrity_faults"):
        if gauges[name] != 0:
            found.append(f"{name} is {gauges[name]}")
    pages = gauges["pages_free"] + gauges["pages_cached"] + gauges["pages_adapters"]
    if not pages == gauges["pages_total"] == result.num_pages:
        found.append(f"{pages} of {result.num_pages} pages are free, cached or an idle adapter's")
    if result.pinned:
        found.append(f"{result.pinned} references to adapters")
    return found


@pytest.mark.parametrize("world", WORLDS)
def test_every_rank_runs_one_pass_a_step(run: Callable[[int], Run], world: int) -> None:
    for name, result in run(world).results.items():
        assert len(result.ranks) == world
        calls = {rank.forward_calls for rank in result.ranks}
        assert calls == {result.counters["steps"]}, name
        assert result.counters["steps"] > 0
        assert result.counters["failed"] == 0


@pytest.mark.parametrize("ending", ["import sys; sys.exit(3)", "import time; time.sleep(600)"])
def test_a_run_that_fails_or_hangs_is_told_and_leaves_no_process(
    tmp_path: Path, ending: str
) -> None:
    script = tmp_path / "script.py"
    pids = tmp_path / "pids"
    script.write_text(f"import os\nprint(os.getpid(), file=open({str(pids)!r}, 'a'))\n{ending}\n")
    workload = tmp_path / "none.json"
    done = run_cases(2, workload, tmp_path, timeout=8, script=[str(script)])
    if "sleep" in ending:
        assert done.exit_code is None
        assert len(done.left) == 3  # torchrun and both ranks
    else:
        assert done.exit_code == 1
        assert done.left == []
    ranks = [int(pid) for pid in pids.read_text().split()]
    assert ranks and os.getpid() not in ranks
    assert not any(psutil.pid_exists(pid) for pid in ranks)
    with pytest.raises(AssertionError, match="has no result at 2 ranks"):
        done.result("anything")
