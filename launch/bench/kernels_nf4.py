"""The NF4 product beside the library's bfloat16 product, shapes of Llama-3.1-8B.

    python -m launch.bench.kernels_nf4

Results are checked against the float32 product first; a wrong one ends the run before any time is
printed. Times are medians of replays of a CUDA graph that goes round copies of the weights, so
that none is found in the L2 cache.
"""

import argparse
import math
import sys
from typing import Any

import torch
from torch.nn.functional import linear as dense_linear

from kernels.nf4.expand import dequantize
from kernels.nf4.gpu import linear
from launch.bench.environment import print_json
from launch.bench.graphs import read_ceiling
from launch.bench.tune_nf4 import (
    BEYOND_L2,
    SHAPES,
    copies,
    error_of,
    microseconds,
    random_packed,
)

ROWS = (1, 4, 16, 64, 256, 4096)
_TOLERANCE = 6e-3  # relative distance; rounding to bfloat16 alone gives 1.7e-3


def check(name: str, rows: tuple[int, ...]) -> None:
    """Exit unless each product, with a bias, is near the float32 one."""
    features, columns = SHAPES[name]
    w = random_packed(features, columns)
    exact = dequantize(w, torch.float32)
    bias = torch.randn(features, device="cuda").bfloat16()
    for m in rows:
        x = torch.randn(m, columns, device="cuda").bfloat16()
        error = error_of(linear(x, w, bias), x.float() @ exact.T + bias.float())
        if error > _TOLERANCE:
            sys.exit(f"{name} with {m} rows is wrong: relative distance {error:.1e}")


def measure(name: str, m: int) -> dict[str, Any]:
    """Return the times of one shape, in microseconds."""
    features, columns = SHAPES[name]
    every = copies(random_packed(features, columns))
    x = torch.randn(m, columns, device="cuda").bfloat16()
    ours = microseconds(lambda i: linear(x, every[i]), len(every))
    held = sum(w.words.nbytes + w.scales.nbytes for w in every) / len(every)
    dense = dequantize(every[0], torch.bfloat16)
    library = [dense, *(dense.clone() for _ in range(max(1, BEYOND_L2 // dense.nbytes)))]
    base = microseconds(lambda i: dense_linear(x, library[i]), len(library))
    moved = held + x.nbytes + 2 * m * features
    return {
        "shape": name,
        "rows": m,
        "us": round(ours, 2),
        "cublas_us": round(base, 2),
        "ratio": round(base / ours, 3),
        "tb_per_s": round(moved / ours / 1e6, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS), help="of x, a line each")
    options = parser.parse_args()
    torch.manual_seed(0)
    for name in SHAPES:
        check(name, tuple(options.rows))
    ceiling = round(read_ceiling(), 2)
    results, means = [], {}
    for m in options.rows:
        row = [measure(name, m) for name in SHAPES]
        results += row
        means[m] = round(math.prod(r["ratio"] for r in row) ** (1 / len(row)), 3)
        cells = "  ".join(f"{r['shape']} {r['us']:.1f} us {r['ratio']:.2f}x" for r in row)
        print(f"M={m:5d} geometric mean {means[m]:.2f}x  {cells}", flush=True)
    print_json(
        "kernels_nf4",
        {"read_ceiling_tb_per_s": ceiling, "geometric_means": means, "results": results},
    )


if __name__ == "__main__":
    main()
