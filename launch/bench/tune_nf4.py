"""Times candidate configurations of the NF4 product on this GPU, all shapes of Llama-3.1-8B.

    python -m launch.bench.tune_nf4 --rows 1 4 16 64 256 --out tuned.json

Kernels are compiled first, by as many processes as there are cores. A configuration whose result
isn't near the float32 product is reported and left out.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from itertools import product
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import linear as dense_linear

from kernels.nf4.expand import dequantize
from kernels.nf4.gemm import GemmConfig, multiply
from kernels.nf4.packed import COLUMNS, ROWS, PackedNF4

SHAPES = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
}
_BEYOND_L2 = 160 << 20
_LAUNCHES = 24


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
    count = max(2, -(-_BEYOND_L2 // w.nbytes))
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
    """Median time of `call(i)`, i going round `count` copies, from replays of a CUDA graph."""
    for i in range(3):
        call(i % count)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(_LAUNCHES):
            call(i % count)
    graph.replay()
    times = []
    for _ in range(9):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / _LAUNCHES)
    return statistics.median(times)


def candidates(rows: int) -> list[GemmConfig]:
    """Return the configurations worth a try for some rows of x."""
    found = []
    if rows <= 16:
        shapes = ((1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4), (8, 2), (8, 4))
        for bm in (8, 16) if rows <= 8 else (16,):
            for (tiles, warps), blocks, stages in product(shapes, (2, 4), (2, 3, 4)):
                splits = (1, 2, 4, 8) if tiles > 1 else (1, 2, 4)
                for split in splits:
                    if (blocks == 2) == (stages == 4) or (blocks == 4 and stages == 3):
                        found.append((tiles, bm, blocks, split, warps, stages, False))
    elif rows <= 64:
        for tiles, warps in ((4, 2), (4, 4), (8, 4), (8, 8), (2, 2)):
            for blocks, stages, split in product((2, 4), (2, 3, 4), (1, 2, 4)):
                if blocks == 4 and stages == 4:
                    continue
                for scaled in (False, True):
                    if tiles == 8 and warps == 4 and not scaled:
                        continue  # spills
                    found.append((tiles, rows, blocks, split, warps, stages, scaled))
    else:
        for tiles, bm, warps, stages in (
            (8, 256, 8, 3),
            (8, 256, 8, 2),
            (4, 256, 4, 3),
            (8, 128, 4, 3),
            (8, 128, 4, 4),
            (8, 128, 8, 3),
            (8, 128, 8, 4),
            (4, 128, 4, 3),
        ):
            for split in (1, 2, 3, 4):
                found.append((tiles, bm, 2, split, warps, stages, True))
    names = ("tiles", "rows", "blocks", "split", "warps", "stages", "scale_weights")
    return [GemmConfig(**dict(zip(names, values, strict=True))) for values in found]


def compile_share(rows: list[int], part: int, parts: int) -> None:
    """Compile every `parts`-th candidate into Triton's cache on disk."""
    w = random_packed(128, 256)
    for config in [c for m in rows for c in candidates(m)][part::parts]:
        try:
            multiply(torch.randn(1, 256, device="cuda", dtype=torch.bfloat16), w, None, config)
        except Exception as error:  # out of shared memory, say: the tuner reports it again
            print(config, repr(error)[:100], file=sys.stderr)


def error_of(y: Tensor, expected: Tensor) -> float:
    """Relative distance; infinite when anything isn't finite."""
    distance = float((y.float() - expected).norm() / expected.norm())
    return distance if distance == distance else float("inf")


def tune(name: str, m: int) -> dict[str, object]:
    """Return the times of all candidates of one shape and the library's."""
    rows, columns = SHAPES[name]
    w = random_packed(rows, columns)
    x = torch.randn(m, columns, device="cuda").bfloat16()
    dense = dequantize(w, torch.bfloat16)
    expected = x.float() @ dequantize(w, torch.float32).T
    library = [dense, *(dense.clone() for _ in range(max(1, _BEYOND_L2 // dense.nbytes)))]
    base = microseconds(lambda i: dense_linear(x, library[i]), len(library))
    library.clear()
    every = copies(w)
    results = []
    for config in candidates(m):
        try:
            error = error_of(multiply(x, w, None, config), expected)
            if error > 6e-3:
                print("WRONG", name, m, config, error)
                continue
            time = microseconds(lambda i, c=config: multiply(x, every[i], None, c), len(every))
        except Exception as failure:
            print("FAILED", name, m, config, repr(failure)[:120])
            continue
        results.append({"us": round(time, 2), "error": round(error, 5), **asdict(config)})
    results.sort(key=lambda r: r["us"])
    return {"shape": name, "m": m, "cublas_us": round(base, 2), "results": results}


def report(found: dict[str, object], show: int) -> None:
    """Print the best of one shape."""
    base = found["cublas_us"]
    print(f"{found['shape']} M={found['m']} cublas {base} us")
    for r in found["results"][:show]:
        print(
            f"   {r['us']:7.2f} us {base / r['us']:5.2f}x err {r['error']:.4f} tiles {r['tiles']} "
            f"rows {r['rows']} blocks {r['blocks']} split {r['split']} warps {r['warps']} "
            f"stages {r['stages']} {'scaled' if r['scale_weights'] else ''}"
        )


def report_expansion() -> None:
    """Print what de-quantising first costs, beside the library's product at prefill sizes."""
    for name, (rows, columns) in SHAPES.items():
        w = random_packed(rows, columns)
        every = copies(w)
        expand = microseconds(lambda i, e=every: dequantize(e[i], torch.bfloat16), len(every))
        dense = dequantize(w, torch.bfloat16)
        line = f"{name} expand {expand:.1f} us;"
        for m in (512, 1024, 4096):
            x = torch.randn(m, columns, device="cuda").bfloat16()
            base = microseconds(lambda i, x=x, d=dense: dense_linear(x, d), 1)
            fused = microseconds(lambda i, x=x, w=w: dense_linear(x, dequantize(w, x.dtype)), 1)
            line += f" M={m} cublas {base:.1f} both {fused:.1f} us ({base / fused:.2f}x);"
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64, 256])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--show", type=int, default=5)
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
    for m, name in product(options.rows, SHAPES):
        everything.append(tune(name, m))
        report(everything[-1], options.show)
        sys.stdout.flush()
        if options.out:
            options.out.write_text(json.dumps(everything))
    report_expansion()


if __name__ == "__main__":
    main()
