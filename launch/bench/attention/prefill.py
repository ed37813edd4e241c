"""Prefill: whole prompts and a chunk behind a cached prefix, beside torch's own attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from kernels.attention import gpu
from kernels.attention.tiles import Tile, prefill_tile
from launch.bench.attention.checks import TOLERANCE, distance
from launch.bench.attention.decode import fastest
from launch.bench.attention.memory import DIM, KV_HEADS, Q_HEADS, Paged, paged, queries
from launch.bench.attention.peers import varlen_calls
from launch.bench.attention.timing import DEVICE, Call, graph_us, peer_us

SCALE = DIM**-0.5
TILES = [
    Tile(lines=128, keys=64, warps=8, stages=2),
    Tile(lines=128, keys=64, warps=8, stages=4),
    Tile(lines=128, keys=32, warps=8, stages=3),
    Tile(lines=128, keys=128, warps=8, stages=2),
    Tile(lines=128, keys=128, warps=8, stages=3),
    Tile(lines=256, keys=64, warps=16, stages=2),
    Tile(lines=64, keys=64, warps=4, stages=2),
    Tile(lines=64, keys=64, warps=4, stages=3),
    Tile(lines=64, keys=128, warps=4, stages=2),
]
CASES = ((32, 2048, 2048), (4, 2048, 2048), (1, 512, 4096), (8, 512, 4096), (1, 64, 4096))
"""(sequences, rows, context)."""


def prefill_table(every_tile: bool) -> list[dict[str, Any]]:
    """Print and return a line a case."""
    print(f"\nprefill, {Q_HEADS} query heads on {KV_HEADS} KV heads of {DIM}")
    print("sequences rows context |       us  TFLOP/s |        sdpa  varlen(256) | best tile")
    rows = []
    for case in CASES:
        rows.append(_case(*case, every_tile))
        torch.cuda.empty_cache()
    return rows


def _case(sequences: int, rows: int, context: int, every_tile: bool) -> dict[str, Any]:
    pairs = sequences * (rows * (context - rows) + rows * (rows + 1) / 2)
    flop = 4 * Q_HEADS * DIM * pairs
    memory, q = paged(rows, [context] * sequences, 1), queries(sequences * rows)
    row: dict[str, Any] = {"sequences": sequences, "rows": rows, "context": context}
    row["us"] = graph_us(_public(memory, q))
    row["tflop_s"] = flop / row["us"] / 1e6
    row["sdpa_us"] = peer_us(_sdpa(sequences, rows, context))
    pages = paged(rows, [context] * sequences, 1, block=256)
    row["varlen_256_us"] = peer_us(varlen_calls(pages, q))
    row["tiles"] = _search(memory, q, rows) if every_tile else []
    best = fastest(row["tiles"])
    print(
        f"{sequences:9} {rows:4} {context:7} | {row['us']:8.1f} {row['tflop_s']:8.0f} | "
        f"{_short(row['sdpa_us']):>11}  {_short(row['varlen_256_us']):>11} | "
        f"{'' if best is None else best}",
        flush=True,
    )
    return row


def _public(memory: Paged, q: Tensor) -> list[Callable[[], Tensor]]:
    return [
        partial(gpu.paged_attention, q, k, v, batch, scale=SCALE, window=None)
        for k, v, batch in memory.places()
    ]


def _search(memory: Paged, q: Tensor, rows: int) -> list[dict[str, Any]]:
    mine = prefill_tile(rows, Q_HEADS // KV_HEADS, DIM, 2)
    out, factor, found = torch.empty_like(q), SCALE * math.log2(math.e), []
    for tile in [mine, *TILES]:
        calls: list[Call] = [
            partial(gpu.launch_prefill, q, k, v, batch, out, factor, None, tile)
            for k, v, batch in memory.places()
        ]
        us = peer_us(calls)  # a tile that this machine has no shared memory for is named, not timed
        if isinstance(us, float) and distance(out, _public(memory, q)[-1]()) > TOLERANCE:
            us = "wrong"
        found.append(
            {
                **{"lines": tile.lines, "keys": tile.keys, "warps": tile.warps},
                **{"stages": tile.stages, "us": us},
            }
        )
    return found


def _sdpa(sequences: int, rows: int, context: int) -> list[Call]:
    """torch's attention on contiguous keys and values: what a gather would have to precede."""
    q, k, v = (
        torch.randn(sequences, heads, count, DIM, dtype=torch.bfloat16, device=DEVICE)
        for heads, count in ((Q_HEADS, rows), (KV_HEADS, context), (KV_HEADS, context))
    )
    mask: Any = None if rows == context else causal_lower_right(rows, context)
    attend = partial(scaled_dot_product_attention, q, k, v, attn_mask=mask, scale=SCALE)
    return [partial(attend, is_causal=mask is None, enable_gqa=True)] * 4


def _short(value: float | str) -> str:
    return f"{value:.1f}" if isinstance(value, float) else "none"
