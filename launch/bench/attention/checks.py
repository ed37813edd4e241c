"""Are the results right, and equal under graph replay?"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context

import torch
from torch import Tensor

from kernels.attention import HeadNorms
from kernels.attention import gpu as attention
from kernels.attention import reference as attention_reference
from kernels.fused import gpu as fused
from kernels.fused import reference as fused_reference
from launch.bench.attention.memory import DIM, KV_HEADS, Q_HEADS, paged, queries
from launch.bench.attention.timing import DEVICE

TOLERANCE = 1.6e-2
"""Largest difference as a share of the largest expected value, bfloat16."""
CONTEXTS = [1, 15, 16, 17, 127, 128, 129, 1000, 2049, 4096]


def run_checks() -> list[str]:
    """Print a line a check; return the names of those that failed.

    Each runs in a process of its own, side by side: most of their time is compilation, whose
    results the timed parts find in Triton's cache.
    """
    failed = []
    with get_context("spawn").Pool(len(_CHECKS)) as pool:
        for name, error in pool.imap(_error, _CHECKS):
            good = error <= TOLERANCE
            print(f"check {name}: relative error {error:.1e} {'ok' if good else 'FAILED'}")
            if not good:
                failed.append(name)
    sys.stdout.flush()
    return failed


def _error(name: str) -> tuple[str, float]:
    torch.manual_seed(0)
    try:
        return name, _CHECKS[name]()
    except Exception:  # a kernel that doesn't compile fails its check, and no other
        traceback.print_exc()
        return name, float("inf")


def distance(actual: Tensor, expected: Tensor) -> float:
    """Largest difference as a share of the largest expected value; infinite for NaN."""
    difference = (actual.float() - expected.float()).abs().max() / expected.float().abs().max()
    return float(difference.nan_to_num(nan=float("inf")))


def _attention(rows: int, contexts: list[int], window: int | None) -> float:
    memory, q = paged(rows, contexts, 1), queries(rows * len(contexts))
    k, v, batch = memory.places()[1]
    actual, expected = (
        op(q, k, v, batch, scale=DIM**-0.5, window=window)
        for op in (attention.paged_attention, attention_reference.paged_attention)
    )
    return distance(actual, expected)


def _replayed() -> float:
    """A captured decode serves other contexts, bit for bit as without a graph."""
    memory, q = paged(1, CONTEXTS, 1), queries(len(CONTEXTS))
    k, v, batch = memory.places()[0]

    def attend() -> Tensor:
        return attention.paged_attention(q, k, v, batch, scale=DIM**-0.5, window=None)

    attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend()
    start, equal = batch.context_lens.clone(), True
    for limit in (4096, 1000, 129, 1):
        batch.context_lens.copy_(start.clamp(max=limit))
        graph.replay()
        equal = equal and torch.equal(out, attend())
    return 0.0 if equal else float("inf")


def _rotate_attend(contexts: list[int], bound: int) -> float:
    heads = torch.randn(len(contexts), Q_HEADS + 2 * KV_HEADS, DIM, device=DEVICE).bfloat16()
    q, k, v = torch.split(heads, [Q_HEADS, KV_HEADS, KV_HEADS], 1)
    table = torch.randn(bound, DIM, device=DEVICE)
    positions = torch.tensor(contexts, device=DEVICE) - 1
    memory = paged(1, contexts, 1, bound=bound)
    k_cache, v_cache, batch = memory.places()[1]
    outs = []
    for op in (attention.rotate_attend, attention_reference.rotate_attend):
        caches = k_cache.clone(), v_cache.clone()
        out = op(
            *(q, k, v, *caches, table, positions, batch),
            **{"norms": None, "scale": DIM**-0.5, "window": None},
        )
        outs.append((out, *caches))
    return max(distance(a, b) for a, b in zip(*outs, strict=True))


def _small() -> float:
    worst = 0.0
    for rows in (1, 33):
        x, residual = (torch.randn(rows, 4096, device=DEVICE).bfloat16() for _ in range(2))
        weight = torch.randn(4096, device=DEVICE).bfloat16()
        q, k = queries(rows), queries(rows)[:, :KV_HEADS]
        table = torch.randn(64, DIM, device=DEVICE)
        positions = torch.randint(0, 64, (rows,), device=DEVICE)
        pairs = [
            (fused.rms_norm(x, weight, 1e-5), fused_reference.rms_norm(x, weight, 1e-5)),
            *zip(
                fused.add_rms_norm(x, residual, weight, 1e-5),
                fused_reference.add_rms_norm(x, residual, weight, 1e-5),
                strict=True,
            ),
            (fused.silu_mul(x), fused_reference.silu_mul(x)),
            *zip(
                fused.rotary(q, k, table, positions),
                fused_reference.rotary(q, k, table, positions),
                strict=True,
            ),
        ]
        worst = max(worst, *(distance(*pair) for pair in pairs))
    return worst


def _rotate_store() -> float:
    contexts, rows = [40, 300], 10
    heads = torch.randn(20, Q_HEADS + 2 * KV_HEADS, DIM, device=DEVICE).bfloat16()
    q, k, v = torch.split(heads, [Q_HEADS, KV_HEADS, KV_HEADS], 1)
    table = torch.randn(512, DIM, device=DEVICE)
    positions = torch.randint(0, 512, (20,), device=DEVICE)
    norms = HeadNorms(q=table[0].bfloat16(), k=table[1].bfloat16(), eps=1e-5)
    worst = 0.0
    for each in (None, norms):
        memory = paged(rows, contexts, 1)
        k_cache, v_cache, batch = memory.places()[2]
        outs = []
        for op in (attention.rotate_store, attention_reference.rotate_store):
            k_cache.zero_()
            v_cache.zero_()
            out = op(q, k, v, k_cache, v_cache, table, positions, batch, norms=each)
            outs.append((out, k_cache.clone(), v_cache.clone()))
        worst = max(worst, *(distance(a, b) for a, b in zip(*outs, strict=True)))
    return worst


_CHECKS: dict[str, Callable[[], float]] = {
    "decode": partial(_attention, 1, CONTEXTS, None),
    "decode window 100": partial(_attention, 1, CONTEXTS, 100),
    "decode replayed": _replayed,
    "decode rotate_attend": partial(_rotate_attend, CONTEXTS, 4096),
    "decode rotate_attend, many": partial(_rotate_attend, [180] * 256, 4096),
    "prefill": partial(_attention, 300, [300, 301, 811, 1500], None),
    "prefill window 100": partial(_attention, 300, [300, 301, 811, 1500], 100),
    "prefill of few rows": partial(_attention, 40, [4000], None),
    "small": _small,
    "small rotate_store": _rotate_store,
}
