"""The adapters' benchmark measures what it says, end to end at tiny shapes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
SMALL = "--shapes tiny --adapters 2 --repeats 1 --batch 2 --steps 12 --registered 2 5"
MEMORY = "--arena 32MiB --host-memory 8MiB"


def test_one_line_has_every_measurement(tmp_path: Path) -> None:
    program = [sys.executable, str(CHECKOUT / "launch/bench/adapters.py")]
    done = subprocess.run(
        [*program, *SMALL.split(), *MEMORY.split(), "--directory", str(tmp_path)],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    line = json.loads(done.stdout.splitlines()[-1])
    assert line["benchmark"] == "adapters" and line["world"] == 1
    first = line["first_token"]
    assert set(first["ms"]) == {"resident", "warm", "cold"} and min(first["ms"].values()) > 0
    assert first["image_bytes_a_rank"] > 0 and first["file_bytes"] > 0
    steps = line["decode_steps"]
    assert steps["quiet"]["copies"] == steps["quiet"]["reads"] == 0
    assert steps["warm_storm"]["copies"] > 0 and steps["cold_storm"]["reads"] > 0
    for name in ("quiet", "warm_storm", "cold_storm"):
        assert sum(steps[name]["histogram_us"].values()) == 12
    assert set(line["registered"]) == {"2", "5"}
    assert all(each["lookup_us"] > 0 for each in line["registered"].values())
    assert list(tmp_path.iterdir()) == [], "the benchmark cleans up"
