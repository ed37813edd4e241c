"""What adapters cost on their way up: store, hosts, arenas; one JSON line.

    python launch/bench/adapters.py [--shapes tiny] [--quantize nf4]
    torchrun --nproc-per-node N launch/bench/adapters.py ...

A base of random weights, adapters of random values in a store of their own. Measured: the time to
the first token with the adapter resident, warm and cold, against the plain copy and the plain read
of as many bytes in the same run; the times of decode steps with and without a storm of loads; what
a start and a lookup cost with many adapters registered.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "0")
sys.path[0] = str(Path(__file__).resolve().parents[2])

from launch.bench.environment import print_json  # noqa: E402 (after environment and path)
from launch.bench.shapes import SHAPES, write_config  # noqa: E402
from launch.bench.tiers.first_token import first_token_s, measure_first_tokens  # noqa: E402
from launch.bench.tiers.material import write_adapter  # noqa: E402
from launch.bench.tiers.registered import measure_registered  # noqa: E402
from launch.bench.tiers.storm import measure_steps  # noqa: E402
from sharding import SITES, ModelDims  # noqa: E402
from tp_engine.adapters.store import AdapterStore  # noqa: E402
from tp_engine.config import EngineConfig, parse_size  # noqa: E402
from tp_engine.engine import Engine  # noqa: E402
from tp_engine.fleet import AdapterLoader  # noqa: E402
from tp_engine.interpreter import freeze_objects  # noqa: E402
from tp_engine.rank import Rank, build_engine, build_rank  # noqa: E402
from tp_engine.ranks.join import join  # noqa: E402
from tp_engine.steps.plan import PlanKind  # noqa: E402


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--shapes",
        choices=sorted(SHAPES),
        default="llama-3.1-8b",
        help="of which model (%(default)s)",
    )
    parser.add_argument("--quantize", choices=["nf4"], help="quantise the base")
    parser.add_argument("--dtype", default="auto", help="of activations (%(default)s)")
    parser.add_argument("--lora-rank", type=int, default=16, help="of every adapter (%(default)s)")
    parser.add_argument(
        "--adapters", type=int, default=4, help="to measure first tokens with (%(default)s)"
    )
    parser.add_argument(
        "--repeats", type=int, default=3, help="of each adapter and tier (%(default)s)"
    )
    parser.add_argument(
        "--batch", type=int, default=32, help="requests that decode beside loads (%(default)s)"
    )
    parser.add_argument(
        "--steps", type=int, default=400, help="decode steps a table's row (%(default)s)"
    )
    parser.add_argument(
        "--arena", type=parse_size, help="size of a rank's arena; without it what is left"
    )
    parser.add_argument(
        "--host-memory",
        type=parse_size,
        default=parse_size("2GiB"),
        help="of a rank, for adapters (2GiB)",
    )
    parser.add_argument(
        "--registered",
        type=int,
        nargs="*",
        default=[500, 1000, 2000],
        help="how many are registered, a row each (500 1000 2000)",
    )
    parser.add_argument("--directory", type=Path, help="for the store; without it a temporary one")
    return parser.parse_args(argv)


def open_store(rank: Rank, root: Path) -> AdapterStore:
    """A store for the rank's base."""
    return AdapterStore(
        root,
        base_digest=rank.base_digest,
        architecture=rank.joined.spec.architecture,
        vocab_size=rank.dims.vocab,
    )


def fill_store(
    loader: AdapterLoader,
    engine: Engine,
    dims: ModelDims,
    directory: Path,
    arguments: argparse.Namespace,
) -> dict[str, Path]:
    """Write, keep and register adapters; where the store has their files, by digest."""
    store, files = loader.store, {}
    assert store is not None
    for number in range(arguments.adapters):
        source = directory / f"source-{number}"
        rank = arguments.lora_rank
        write_adapter(source, dims, rank=rank, seed=number, sites=SITES, layers=dims.layers)
        revision, images = loader.load(source)
        engine.roster.register(f"adapter-{number}", revision, images)
        files[revision.digest] = store.directory(revision.digest)
    return files


def warm(engine: Engine, digests: list[str], batch: int) -> None:
    """Compile and capture what is measured, and no more."""
    for digest in ("", *digests):
        first_token_s(engine, digest)
    engine.capture()
    measure_steps(engine, digests[:1], batch=batch, steps=4)


def measure(rank: Rank, arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Everything, on rank 0."""
    store = open_store(rank, directory / "store")
    loader = AdapterLoader(rank, store)
    engine = build_engine(rank, loader.fetch)
    files = fill_store(loader, engine, rank.dims, directory, arguments)
    warm(engine, list(files), arguments.batch)
    freeze_objects()  # as the server does
    results = {
        "first_token": measure_first_tokens(engine, loader, files, arguments.repeats),
        "decode_steps": measure_steps(
            engine, list(files), batch=arguments.batch, steps=arguments.steps
        ),
    }
    engine.control(PlanKind.STOP)
    store.close()
    many = partial(open_store, rank, directory / "many")
    results["registered"] = measure_registered(rank, many, directory, arguments.registered)
    return results


def main() -> None:
    """Build the engine, measure, print the JSON line."""
    arguments = parse()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as made:
        directory = Path(made)
        config = EngineConfig(
            model=str(write_config(directory / "model", arguments.shapes)),
            load_format="dummy",
            quantize=arguments.quantize,
            dtype=arguments.dtype,
            max_model_len=2048,
            max_num_seqs=arguments.batch,
            arena_bytes=arguments.arena,
            adapter_host_memory=arguments.host_memory,
            enable_prefix_caching=False,
        )
        rank = build_rank(join(config))
        if rank.comm.rank == 0:
            results = measure(rank, arguments, directory)
            kept = ("shapes", "quantize", "dtype", "lora_rank", "adapters", "batch")
            settings = {name: getattr(arguments, name) for name in kept}
            print_json("adapters", {**settings, "world": rank.comm.world, **results})
        else:
            rank.worker.follow(lambda: None)


if __name__ == "__main__":
    main()
