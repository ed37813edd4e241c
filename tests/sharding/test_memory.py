"""Peak memory of loading, held to a limit by the operating system in a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

from kernels.nf4 import NF4_CODE

ROWS, COLS = 4096, 16384
PACKED = ROWS * COLS // 2  # 32 MiB

LOAD = """
import resource, sys, torch
from sharding import BnbTensor, Checkpoint, Span
directory, budget = sys.argv[1], int(sys.argv[2])
rows, cols = Span(*map(int, sys.argv[3:5])), Span(*map(int, sys.argv[5:7]))
torch.set_num_threads(1)
torch.zeros(4) + 1
with open("/proc/self/status") as status:
    used = next(int(line.split()[1]) for line in status if line.startswith("VmData")) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (used + budget, used + budget))
with Checkpoint.open(directory) as ckpt:
    shard = BnbTensor.from_checkpoint(ckpt, "x.weight").cut(rows, cols)
print(shard.nbytes)
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("large")
    state = (
        f'{{"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [{ROWS}, {COLS}]}}'
    )
    tensors = {
        "x.weight": torch.zeros(PACKED, 1, dtype=torch.uint8),
        "x.weight.absmax": torch.ones(ROWS * COLS // 64),
        "x.weight.quant_map": torch.tensor(NF4_CODE),
        "x.weight.quant_state.bitsandbytes__nf4": torch.tensor(
            list(state.encode()), dtype=torch.uint8
        ),
    }
    safetensors.torch.save_file(tensors, path / "model.safetensors")
    return path


def load(directory: Path, budget: int, *spans: int) -> "subprocess.CompletedProcess[str]":
    arguments = [str(directory), str(budget), *map(str, spans)]
    return subprocess.run(
        [sys.executable, "-c", LOAD, *arguments],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.skipif(sys.platform != "linux", reason="needs RLIMIT_DATA and /proc")
@pytest.mark.parametrize("spans", [(0, ROWS // 4, 0, COLS), (0, ROWS, COLS // 4, COLS // 2)])
def test_a_shard_is_cut_within_its_own_size_and_less_than_one_tensor(
    directory: Path, spans: tuple[int, ...]
) -> None:
    done = load(directory, PACKED // 4 + PACKED - (4 << 20), *spans)
    assert done.returncode == 0, done.stderr
    assert PACKED // 4 < int(done.stdout) < PACKED // 3
    refused = load(directory, PACKED // 4, *spans)  # the limit bites
    assert refused.returncode != 0
    assert "memory" in refused.stderr.lower()
