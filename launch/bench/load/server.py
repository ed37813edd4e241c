"""A server of made-up weights and adapters, started for a run."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from launch.bench.load.client import Target
from launch.bench.shapes import SHAPES, random_revision, write_config
from launch.bench.tokenizer import write_tokenizer

CHECKOUT = Path(__file__).resolve().parents[3]
HOST = "127.0.0.1"
BASE = "base"
READY_SECONDS = 900.0
STOP_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """A model's directory with its adapters and keys."""

    directory: Path
    adapters: dict[str, Path]
    keys: tuple[str, ...]

    def options(self) -> list[str]:
        """Options of ``launch/serve.py`` that serve it."""
        chosen = [f"--model={self.directory}", f"--served-model-name={BASE}"]
        chosen += ["--load-format=dummy"]
        return chosen + [f"--lora={name}={path}" for name, path in self.adapters.items()]


def make_model(directory: Path, shapes: str, adapters: int, rank: int, tenants: int) -> Made:
    """Write a configuration, a tokenizer, adapters of one LoRA rank on all linears, and keys.

    The adapters share one file of random tensors and differ in their scale, which makes each an
    adapter of its own to the server.
    """
    from safetensors.torch import save_file

    from sharding import SITES
    from tp_engine.adapters.targets import module_name
    from tp_engine.models import ModelSpec

    write_tokenizer(write_config(directory, shapes), SHAPES[shapes]["vocab_size"])
    paths = {f"adapter-{i}": directory / "adapters" / str(i) for i in range(adapters)}
    tensors = {}
    if adapters:
        revision = random_revision(ModelSpec.from_directory(directory).dims(), rank, seed=0)
        for place, module in revision.modules.items():
            prefix = f"base_model.model.{module_name(*place)}"
            tensors[f"{prefix}.lora_A.weight"] = module.a
            tensors[f"{prefix}.lora_B.weight"] = module.b
    for number, path in enumerate(paths.values()):
        path.mkdir(parents=True)
        if number == 0:
            save_file(tensors, path / "adapter_model.safetensors")
        else:
            first = directory / "adapters" / "0" / "adapter_model.safetensors"
            os.link(first, path / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank + number}
        config["target_modules"] = list(SITES)
        (path / "adapter_config.json").write_text(json.dumps(config))
    keys = tuple(f"tenant-key-{number}" for number in range(tenants)) if tenants > 1 else ()
    (directory / "keys").write_text("\n".join(keys))
    return Made(directory=directory, adapters=paths, keys=keys)


@contextmanager
def started(made: Made, ranks: int, options: Sequence[str]) -> Iterator[Target]:
    """Serve it while the context lasts; the server's log goes to standard error.

    Raises:
        RuntimeError: the server ended, or was not ready in time.
    """
    with socket.create_server((HOST, 0)) as probe:
        port: int = probe.getsockname()[1]
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [sys.executable, *(torchrun if ranks > 1 else []), str(CHECKOUT / "launch/serve.py")]
    command += [*made.options(), f"--host={HOST}", f"--port={port}"]
    command += [f"--api-key-file={made.directory / 'keys'}"] if made.keys else []
    process = subprocess.Popen([*command, *options], stdout=sys.stderr, start_new_session=True)
    try:
        target = Target(host=HOST, port=port, keys=made.keys)
        _wait_until_ready(process, target)
        yield target
    finally:
        _stop(process)


def _wait_until_ready(process: subprocess.Popen[bytes], target: Target) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while not is_ready(target):
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with exit code {process.returncode}")
        if time.monotonic() > deadline:
            raise RuntimeError(f"the server was not ready within {READY_SECONDS:g} s")
        time.sleep(0.1)


def is_ready(target: Target) -> bool:
    """Whether the server says so."""
    request = f"GET /ready HTTP/1.1\r\nhost: {target.host}\r\nconnection: close\r\n\r\n"
    try:
        with socket.create_connection((target.host, target.port), timeout=5) as connection:
            connection.sendall(request.encode())
            return b" 200 " in connection.recv(64)
    except OSError:
        return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Let the ranks drain and end; kill what does not."""
    with suppress(psutil.NoSuchProcess):
        first = psutil.Process(process.pid)
        family = [first, *first.children(recursive=True)]
        # torchrun itself would end in a traceback; its ranks take it along.
        ranks = [child for child in first.children() if "serve.py" in " ".join(child.cmdline())]
        for rank in ranks or [first]:
            rank.terminate()
        _, alive = psutil.wait_procs(family, timeout=STOP_SECONDS)
        for each in alive:
            each.kill()
    process.wait()
