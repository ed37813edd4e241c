"""The engine over NCCL on several GPUs, and over gloo on one GPU that two ranks share.

The parts of ``launch/bench/multigpu.py`` are the tests: they check before they measure.
"""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from launch.bench.multigpu import parse
from launch.bench.several.processes import run, torchrun
from launch.bench.several.table import floor_us, share_table, speed_table, sums_table

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
needs_several = pytest.mark.skipif(GPUS < 2, reason="needs more than one CUDA device")


def finished(ranks: int, log: Path, *program: str) -> dict[str, Any]:
    """What a program says at its end."""
    done = run(torchrun(ranks, "-m", *program), log, 250)
    assert done.code == 0, done.output[-4000:]
    return done.json()


@pytest.mark.multigpu
@needs_several
@pytest.mark.parametrize("ranks", sorted({2, max(2, GPUS)}))
def test_every_way_to_sum_is_right_and_equal_on_all_ranks(ranks: int, tmp_path: Path) -> None:
    rows = ["--rows", "1", "3", "64", "256", "300"]
    found = finished(ranks, tmp_path / "log", "launch.bench.several.sums", *rows)
    assert found["wrong"] == []
    assert {"nccl", "mailboxes"} <= set(found["us"])


@pytest.mark.multigpu
@needs_several
def test_ranks_on_gpus_of_their_own_equal_one_rank(tmp_path: Path) -> None:
    found = finished(
        2, tmp_path / "log", "launch.bench.several.checks", str(tmp_path), "--dtype", "float32"
    )
    assert len(found["checks"]) == 4 and all(row["ok"] for row in found["checks"])


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 1, reason="needs a CUDA device")
def test_ranks_that_share_a_gpu_equal_one_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    program = ("launch.bench.several.checks", str(tmp_path), "--backend=gloo")
    found = finished(2, tmp_path / "log", *program, "--dtype", "float32")
    assert len(found["checks"]) == 4 and all(row["ok"] for row in found["checks"])


@pytest.mark.slow
def test_eight_ranks_on_the_cpu_equal_one_rank(tmp_path: Path) -> None:
    """By the benchmark's own command; some of the ranks hold no unit of a module."""
    options = ["--ranks=8", "--device=cpu", "--quick", "--only", "checks"]
    done = run([sys.executable, "launch/bench/multigpu.py", *options], tmp_path / "log", 250)
    found = done.json()
    assert done.code == 0 and found["failed"] == [], done.output[-4000:]
    assert [row["ok"] for row in found["checks"]["rows"]] == [True, True]
    assert "9 heads in 3 groups, plain      float32   ok" in done.output


def test_parts_that_need_gpus_are_refused_without_them() -> None:
    assert parse(["--ranks=2", "--device=cpu"]).only == ["checks", "killed"]
    for argv in (["--ranks=2", "--device=cpu", "--only", "sums"], ["--ranks=1"]):
        with pytest.raises(SystemExit, match="2"):
            parse(argv)


def test_the_table_shows_how_well_speed_scales() -> None:
    found = {
        "8B NF4 on 1": {"decode_ms": {"1x0": 3.0}, "prefill": {"32": 30000}},
        "8B NF4 on 2": {"decode_ms": {"1x0": 2.0, "1x1": 2.5}, "prefill": {"32": 60000}},
    }
    rows = [line.split() for line in speed_table(found, 2).splitlines()[1:]]
    assert rows[0][3:] == ["ms", "3.0", "2.0", "1.50", "0.75"]
    assert rows[1][3:] == ["ms", "-", "2.5"]
    assert rows[2][3:] == ["tokens/s", "30000", "60000", "2.00", "1.00"]


def test_the_sums_share_is_what_a_step_without_them_saves() -> None:
    found = {
        "8B NF4 on 2": {"decode_ms": {"1x0": 2.0, "1x1": 2.5}},
        "8B NF4 without sums": {"decode_ms": {"1x0": 1.5}},
    }
    assert share_table(found, 2).splitlines()[1].split()[3:] == ["2.0", "0.500", "25.0%"]


def test_the_link_needs_time_for_what_every_rank_sends() -> None:
    found = {"ranks": 4, "hidden": 1000, "link_GB_per_s": 100, "us": {"nccl": {"10": 5.0}}}
    assert floor_us(found, 10) == pytest.approx(1.5 * 20_000 / 100e9 * 1e6)
    assert sums_table(found).splitlines()[1].split() == ["nccl", "5.0"]
