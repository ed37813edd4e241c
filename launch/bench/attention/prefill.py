"""Prefill: whole prompts and a chunk behind a cached prefix, beside torch's own attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from kernels.attention import gpu
from kernels.attention.hopper import fits_hopper, launch_hopper
from kernels.attention.prefill import launch_prefill, tile_count
from kernels.attention.tiles import HopperTile, Tile, prefill_splits
from launch.bench.attention.checks import TOLERANCE, distance
from launch.bench.attention.decode import fastest
from launch.bench.attention.memory import DIM, KV_HEADS, Q_HEADS, Paged, paged, queries
from launch.bench.attention.peers import varlen_calls
from launch.bench.attention.timing import DEVICE, peer_us
from launch.bench.graphs import Call, graph_us

SCALE = DIM**-0.5
TILES = [
    Tile(lines=lines, keys=keys, warps=warps, stages=stages)
    for lines, keys, warps, stages in (
        *((256, 64, 16, 3), (128, 64, 8, 3), (128, 128, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3)),
        (64, 128, 4, 2),
    )
]
HOPPER_TILES = [
    HopperTile(keys=keys, stages=stages, each=each)
    for keys, stages in ((128, 2), (64, 3))
    for each in (1, 2, 4)
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
    row["tiles"] = _search(memory, q, sequences) if every_tile else []
    best = fastest(row["tiles"])
    del memory
    pages = paged(rows, [context] * sequences, 1, block=256)
    row["varlen_256_us"] = peer_us(varlen_calls(pages, q))
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


def _search(memory: Paged, q: Tensor, sequences: int) -> list[dict[str, Any]]:
    out, factor, found = torch.empty_like(q), SCALE * gpu.LOG2_E, []
    places, context = memory.places(), memory.batches[0].max_context

    def note(tile: Tile | HopperTile, calls: list[Call], **more: int) -> None:
        us = peer_us(calls)  # a tile that this machine has no shared memory for is not timed
        if isinstance(us, float) and distance(out, _public(memory, q)[-1]()) > TOLERANCE:
            us = "wrong"
        found.append({**dataclasses.asdict(tile), **more, "us": us})

    if fits_hopper(q, *places[0][:2]):
        for hopper in HOPPER_TILES:
            note(hopper, [partial(launch_hopper, q, *p, out, factor, None, hopper) for p in places])
    for tile in TILES:
        tiles = tile_count(len(q), sequences, Q_HEADS // KV_HEADS, tile) * KV_HEADS
        most = prefill_splits(tiles, context)
        for n in sorted({1, -(-most // 2), most}):
            note(
                tile,
                [partial(launch_prefill, q, *p, out, factor, None, tile, n) for p in places],
                splits=n,
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
