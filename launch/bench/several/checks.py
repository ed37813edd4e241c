"""Under torchrun: the sharding validator on uneven cuts, plain and NF4, in one set of processes.

    torchrun --nproc-per-node N -m launch.bench.several.checks DIRECTORY [--dtype TYPE ...]

Each model is loaded with adapters of LoRA ranks 1, 5, 16 and 33; every tensor of every rank is
compared with the files, and layer outputs, logits and 32 greedy tokens a sequence (one batch of
base and adapters, decode steps captured where they can be) with world size 1.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

from launch.bench.several.files import UNEVEN, write_adapter, write_checkpoint
from launch.validation.options import read_options
from launch.validation.run import run_rank
from tp_engine.models import ModelSpec

RANKS = (1, 5, 16, 33)


def write_models(root: Path) -> dict[str, tuple[Path, list[str]]]:
    """Directory and adapter options of each model, by its name."""
    models = {}
    for number, (name, sizes) in enumerate(UNEVEN.items()):
        for nf4 in (False, True):
            where = root / f"{number}-{'nf4' if nf4 else 'plain'}"
            write_checkpoint(where / "model", sizes, nf4=nf4, seed=number)
            spec = ModelSpec.from_directory(where / "model")
            lora = [f"r{r}={write_adapter(where / f'r{r}', spec, r)}" for r in RANKS]
            models[f"{name}, {'NF4' if nf4 else 'plain'}"] = (where / "model", lora)
    return models


def share_models(root: Path, rank: int) -> dict[str, tuple[str, list[str]]]:
    """As `write_models`; rank 0 writes them."""
    done = root / "models.json"
    if rank == 0:
        models = {name: (str(path), lora) for name, (path, lora) in write_models(root).items()}
        unready = root / "unready"
        unready.write_text(json.dumps(models))
        unready.rename(done)
    while not done.exists():
        time.sleep(0.05)
    shared: dict[str, tuple[str, list[str]]] = json.loads(done.read_text())
    return shared


def main() -> None:
    """Check the models in all types; rank 0 prints one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, help="for the models; all ranks see it")
    parser.add_argument("--dtype", nargs="+", default=["float32"])
    parser.add_argument("--models", nargs="+", help="parts of names (default: all models)")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--device", default="auto")
    given = parser.parse_args()
    rank = int(os.environ["RANK"])
    models = share_models(given.directory, rank)
    rows: list[dict[str, Any]] = []
    for dtype in given.dtype:
        for name, (path, lora) in models.items():
            if given.models and not any(part in name for part in given.models):
                continue
            start = time.perf_counter()
            options = [f"--{key}={getattr(given, key)}" for key in ("backend", "device")]
            arguments = ["--model", path, "--lora", *lora, f"--dtype={dtype}", *options]
            code = run_rank(read_options(arguments))
            seconds = round(time.perf_counter() - start, 1)
            rows.append({"model": name, "dtype": dtype, "ok": code == 0, "seconds": seconds})
            if code:  # another rank may have ended
                return _print(rank, rows)
    _print(rank, rows)


def _print(rank: int, rows: list[dict[str, Any]]) -> None:
    if rank == 0:
        print(json.dumps({"checks": rows}), flush=True)


if __name__ == "__main__":
    main()
