"""The engine over NCCL on several GPUs, and over gloo on one GPU that two ranks share.

The parts of ``launch/bench/multigpu.py`` are the tests: they check before they measure.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from launch.bench.several.processes import run, torchrun

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
    """Some of them hold no unit of a module."""
    models = ["--models", "9 heads in 3 groups, plain", "28 heads in 4 groups, NF4"]
    program = ("launch.bench.several.checks", str(tmp_path), "--device=cpu", *models)
    found = finished(8, tmp_path / "log", *program)
    assert [row["ok"] for row in found["checks"]] == [True, True]
