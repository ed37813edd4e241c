"""Times candidate configurations of the NF4 product on this GPU, all shapes of Llama-3.1-8B.

    python -m launch.bench.tune_nf4 --ranks 1 2 --table kernels/nf4/tuned.py

``--ranks``: as cut over so many ranks. The table keeps what isn't measured again.

Kernels are compiled first, by as many processes as there are cores. A configuration whose result
isn't near the float32 product is reported and left out.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear as dense_linear

from kernels.nf4.expand import dequantize, scaled_weight
from kernels.nf4.few import multiply_few
from kernels.nf4.few_config import FewConfig
from kernels.nf4.gemm import GemmConfig, OutOfResources, multiply
from kernels.nf4.gpu import linear
from kernels.nf4.packed import COLUMNS, ROWS
from kernels.nf4.packed_weight import PackedNF4
from kernels.nf4.wide import multiply_wide
from kernels.nf4.wide_config import WideConfig
from launch.bench.graphs import graph_us
from launch.bench.nf4_candidates import candidates, few_candidates, wide_candidates
from launch.bench.nf4_table import write_table

Config = GemmConfig | WideConfig | FewConfig
KINDS: dict[type[Config], str] = {GemmConfig: "gemm", WideConfig: "wide", FewConfig: "few"}

SHAPES = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
}
ROW_PARALLEL = ("o", "down")
BEYOND_L2 = 160 << 20
_LAUNCHES = 24


def shape_of(name: str, ranks: int) -> tuple[int, int]:
    """(features, columns) of a rank's part."""
    features, columns = SHAPES[name]
    return (features, columns // ranks) if name in ROW_PARALLEL else (features // ranks, columns)


def random_packed(rows: int, columns: int) -> PackedNF4:
    """Return a packed weight of random codes on the GPU."""
    high, wide = -(-rows // ROWS) * ROWS, -(-columns // COLUMNS) * COLUMNS
    words = torch.randint(-(1 << 31), 1 << 31, (high // 16, wide * 2), device="cuda")
    scale = (torch.rand(wide // 128, high, device="cuda") + 0.5).bfloat16().view(torch.int16).int()
    pairs = (scale & 0xFFFF) | (scale << 16)
    return PackedNF4(
        words=words.int(),
        scales=pairs,
        rest=torch.zeros_like(pairs),
        rows=rows,
        columns=columns,
    )


def copies(w: PackedNF4) -> list[PackedNF4]:
    """Return enough copies that reading them in turn finds none in the L2 cache."""
    count = max(2, -(-BEYOND_L2 // w.nbytes))
    again = [
        PackedNF4(
            words=w.words.clone(),
            scales=w.scales.clone(),
            rest=w.rest,
            rows=w.rows,
            columns=w.columns,
        )
        for _ in range(count - 1)
    ]
    return [w, *again]


def microseconds(call: Callable[[int], object], count: int) -> float:
    """Median time of `call(i)`, i going round `count` copies, in a CUDA graph."""
    return graph_us([partial(call, i % count) for i in range(_LAUNCHES)], replays=9)


def compile_share(rows: list[int], part: int, parts: int) -> None:
    """Compile every `parts`-th candidate into Triton's cache on disk."""
    w = random_packed(128, 4096)
    every = [(m, config) for m in rows for config in _every(m)]
    for m, config in every[part::parts]:
        x = torch.randn(m, 4096, device="cuda", dtype=torch.bfloat16)
        try:
            _product(x, [w], config, 0)
        except OutOfResources as error:  # the tuner reports it again
            print(config, error, file=sys.stderr)


def _every(rows: int) -> list[Config]:
    return [*candidates(rows), *wide_candidates(rows), *few_candidates(rows)]


def error_of(y: Tensor, expected: Tensor) -> float:
    """Relative distance; infinite when anything isn't finite."""
    distance = float((y.float() - expected).norm() / expected.norm())
    return distance if distance == distance else float("inf")


def _product(x: Tensor, every: list[PackedNF4], config: Config, i: int) -> Tensor:
    if isinstance(config, WideConfig):
        return multiply_wide(x, every[i], None, config)
    if isinstance(config, FewConfig):
        return multiply_few(x, every[i], None, config)
    return multiply(x, every[i], None, config)


def tune(name: str, shape: tuple[int, int], m: int) -> dict[str, Any]:
    """Return the times of all candidates of one shape and the library's."""
    rows, columns = shape
    w = random_packed(rows, columns)
    x = torch.randn(m, columns, device="cuda").bfloat16()
    dense = dequantize(w, torch.bfloat16)
    expected = x.float() @ dequantize(w, torch.float32).T
    library = [dense, *(dense.clone() for _ in range(max(1, BEYOND_L2 // dense.nbytes)))]
    base = microseconds(partial(_library, x, library), len(library))
    library.clear()
    every = copies(w)
    results: list[dict[str, Any]] = []
    for config in _every(m):
        try:
            error = error_of(_product(x, [w], config, 0), expected)
            if error > 6e-3:
                print("WRONG", name, m, config, error)
                continue
            time = microseconds(partial(_product, x, every, config), len(every))
        except (OutOfResources, ValueError) as failure:
            print("FAILED", name, m, repr(failure)[:60])
            continue
        kind = KINDS[type(config)]
        results.append({"us": round(time, 2), "error": round(error, 5), kind: asdict(config)})
    results.sort(key=lambda r: r["us"])
    return {"name": name, "shape": shape, "m": m, "cublas_us": round(base, 2), "results": results}


def report(found: dict[str, Any], show: int) -> None:
    """Print the best of one shape."""
    base = found["cublas_us"]
    print(f"{found['name']} {found['shape']} M={found['m']} cublas {base} us")
    for r in found["results"][:show]:
        print(
            f"   {r['us']:7.2f} us {base / r['us']:5.2f}x err {r['error']:.4f} "
            f"{_kind(r)} " + " ".join(f"{key} {int(value)}" for key, value in r[_kind(r)].items())
        )


def _kind(result: dict[str, Any]) -> str:
    return next(kind for kind in KINDS.values() if kind in result)


def _expand(every: list[PackedNF4], i: int) -> Tensor:
    return scaled_weight(every[i], torch.bfloat16)


def _linear(x: Tensor, every: list[PackedNF4], i: int) -> Tensor:
    return linear(x, every[i])


def _library(x: Tensor, every: list[Tensor], i: int) -> Tensor:
    return dense_linear(x, every[i])


def report_expansion() -> None:
    """Print what expanding first costs, beside the library's product at prefill sizes."""
    for name, (rows, columns) in SHAPES.items():
        w = random_packed(rows, columns)
        every = copies(w)
        expand = microseconds(partial(_expand, every), len(every))
        dense = dequantize(w, torch.bfloat16)
        line = f"{name} expand {expand:.1f} us;"
        for m in (512, 1024, 4096):
            x = torch.randn(m, columns, device="cuda").bfloat16()
            base = microseconds(partial(_library, x, [dense]), 1)
            both = microseconds(partial(_linear, x, every), len(every))
            line += f" M={m} {base:.1f} both {both:.1f} ({base / both:.2f}x);"
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 32, 64, 96, 128, 256])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path, help="where to write the table, as Python")
    parser.add_argument("--expansion", action="store_true", help="time expanding first too")
    parser.add_argument("--show", type=int, default=5)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES))
    parser.add_argument("--compile-share", type=int, nargs=2)
    options = parser.parse_args()
    if options.compile_share:
        compile_share(options.rows, *options.compile_share)
        return
    parts = max(1, (os.cpu_count() or 1) - 1)
    rows = [str(m) for m in options.rows]
    command = [sys.executable, "-m", "launch.bench.tune_nf4", "--rows", *rows]
    workers = [
        subprocess.Popen([*command, "--compile-share", str(part), str(parts)])
        for part in range(parts)
    ]
    for worker in workers:
        worker.wait()
    torch.manual_seed(0)
    everything = []
    for ranks, m, name in product(options.ranks, options.rows, options.shapes):
        everything.append(tune(name, shape_of(name, ranks), m))
        report(everything[-1], options.show)
        sys.stdout.flush()
        if options.out:
            options.out.write_text(json.dumps(everything))
        if options.table:
            write_table(everything, options.table)
    if options.expansion:
        report_expansion()


if __name__ == "__main__":
    main()
