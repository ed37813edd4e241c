"""The small ops: what each adds to a captured step, beside the same in plain torch."""

from __future__ import annotations

from typing import Any

import torch

from kernels.attention import gpu as attention
from kernels.fused import gpu as fused
from kernels.fused import reference as fused_reference
from launch.bench.attention.memory import DIM, KV_HEADS, Q_HEADS, paged
from launch.bench.attention.timing import DEVICE
from launch.bench.graphs import Call, graph_us

HIDDEN, INTERMEDIATE = 4096, 14336
LAUNCHES = 32


def small_table(every_tile: bool) -> list[dict[str, Any]]:
    """Print and return a line a (rows, op); without `every_tile` only the fewest and most rows."""
    print("\nsmall ops in a graph, us (torch: the reference's single steps)")
    print("  rows op                  us    GB/s   torch")
    rows = []
    for count in (1, 32, 256, 8192) if every_tile else (1, 8192):
        for name, (mine, plain, moved) in _ops(count).items():
            us, torch_us = graph_us([mine] * LAUNCHES), graph_us([plain] * LAUNCHES)
            print(
                f"{count:6} {name:15} {us:7.2f} {moved / us / 1e3:7.0f} {torch_us:7.2f}", flush=True
            )
            rows.append({"rows": count, "op": name, "us": us, "torch_us": torch_us})
    return rows


def _ops(rows: int) -> dict[str, tuple[Call, Call, int]]:
    """By name: (op, plain torch, bytes moved)."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=DEVICE).bfloat16()

    x, residual, weight = random(rows, HIDDEN), random(rows, HIDDEN), random(HIDDEN)
    gate_up = random(rows, 2 * INTERMEDIATE)
    qkv = random(rows, Q_HEADS + 2 * KV_HEADS, DIM)
    q, k, v = torch.split(qkv, [Q_HEADS, KV_HEADS, KV_HEADS], 1)
    table, positions = torch.randn(4096, DIM, device=DEVICE), torch.arange(rows, device=DEVICE) % 64
    k_cache, v_cache, batch = paged(1, [64] * rows, 1).places()[0]
    heads = (Q_HEADS + KV_HEADS) * DIM
    # Plain torch stores without the search for padding, which a graph can't hold.
    pages, slots = batch.write_pages.long(), batch.write_slots.long()

    def plain_store() -> None:
        k_cache[pages, :, slots] = k
        v_cache[pages, :, slots] = v

    def plain_rotate_store() -> None:
        turned = fused_reference.rotary(q, k, table, positions)[1]
        k_cache[pages, :, slots] = turned
        v_cache[pages, :, slots] = v

    return {
        "rms_norm": (
            lambda: fused.rms_norm(x, weight, 1e-5),
            lambda: fused_reference.rms_norm(x, weight, 1e-5),
            4 * rows * HIDDEN,
        ),
        "add_rms_norm": (
            lambda: fused.add_rms_norm(x, residual, weight, 1e-5),
            lambda: fused_reference.add_rms_norm(x, residual, weight, 1e-5),
            8 * rows * HIDDEN,
        ),
        "silu_mul": (
            lambda: fused.silu_mul(gate_up),
            lambda: fused_reference.silu_mul(gate_up),
            6 * rows * INTERMEDIATE,
        ),
        "rotary": (
            lambda: fused.rotary(q, k, table, positions),
            lambda: fused_reference.rotary(q, k, table, positions),
            4 * rows * heads,
        ),
        "store_kv": (
            lambda: attention.store_kv(k, v, k_cache, v_cache, batch),
            plain_store,
            8 * rows * KV_HEADS * DIM,
        ),
        "rotate_store": (
            lambda: attention.rotate_store(
                q, k, v, k_cache, v_cache, table, positions, batch, norms=None
            ),
            plain_rotate_store,
            4 * rows * (heads + KV_HEADS * DIM),
        ),
    }
