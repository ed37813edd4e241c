"""Decode: batches x contexts x tiles x lengths of a split, beside torch's own attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kernels.attention import gpu
from kernels.attention.tiles import Tile, decode_tile, split_tokens
from launch.bench.attention.checks import TOLERANCE, distance
from launch.bench.attention.memory import (
    DIM,
    KV_HEADS,
    LAYERS,
    Q_HEADS,
    TOKEN_BYTES,
    Paged,
    paged,
    queries,
)
from launch.bench.attention.peers import varlen_calls
from launch.bench.attention.timing import BEYOND_L2, DEVICE, Call, graph_us, peer_us

SCALE = DIM**-0.5
BOUND = 8192
"""Contexts are known on the host only up to this: what a captured step has to be ready for."""
TILES = [
    Tile(lines=16, keys=64, warps=4, stages=2),
    Tile(lines=16, keys=64, warps=4, stages=4),
    Tile(lines=16, keys=32, warps=4, stages=4),
    Tile(lines=16, keys=32, warps=2, stages=4),
    Tile(lines=16, keys=64, warps=8, stages=3),
    Tile(lines=16, keys=128, warps=4, stages=2),
    Tile(lines=16, keys=128, warps=8, stages=3),
]
SPLITS = (128, 256, 512, 1024, 2048, 4096)


def decode_table(every_tile: bool) -> list[dict[str, Any]]:
    """Print and return a line a (batch, context)."""
    print(f"\ndecode, {Q_HEADS} query heads on {KV_HEADS} KV heads of {DIM}, bound {BOUND}")
    print(
        "batch context |     us   TB/s  split | exact         sdpa  varlen(256) | best tile, split"
    )
    rows = []
    for batch in (1, 32, 128, 256):
        for context in (128, 1024, 4096):
            rows.append(_case(batch, context, every_tile))
            torch.cuda.empty_cache()
    return rows


def _case(batch: int, context: int, every_tile: bool) -> dict[str, Any]:
    bytes_read = batch * context * TOKEN_BYTES
    sets = min(64, max(1, math.ceil(BEYOND_L2 / (bytes_read * LAYERS))))
    memory, q = paged(1, [context] * batch, sets, bound=BOUND), queries(batch)
    mine, split = decode_tile(Q_HEADS // KV_HEADS, DIM, 2), split_tokens(batch * KV_HEADS, BOUND)
    row: dict[str, Any] = {"batch": batch, "context": context, "split": split}
    row["us"] = graph_us(_public(memory, q))
    row["tb_s"] = bytes_read / row["us"] / 1e6
    row["exact_bound_us"] = graph_us(_public(paged(1, [context] * batch, sets), q))
    row["sdpa_us"] = peer_us(_sdpa(batch, context, sets * LAYERS, q))
    pages = paged(1, [context] * batch, sets, block=256)
    row["varlen_256_us"] = peer_us(varlen_calls(pages, q))
    del pages
    row["tiles"] = _search(memory, q, mine, context) if every_tile else []
    best = fastest(row["tiles"])
    print(
        f"{batch:5} {context:7} | {row['us']:6.1f} {row['tb_s']:6.2f} {split:6} | "
        f"{row['exact_bound_us']:5.1f}  {_short(row['sdpa_us']):>11}  "
        f"{_short(row['varlen_256_us']):>11} | {'' if best is None else _describe(best)}",
        flush=True,
    )
    return row


def _public(memory: Paged, q: Tensor) -> list[Callable[[], Tensor]]:
    return [
        partial(gpu.paged_attention, q, k, v, batch, scale=SCALE, window=None)
        for k, v, batch in memory.places()
    ]


def _search(memory: Paged, q: Tensor, mine: Tile, context: int) -> list[dict[str, Any]]:
    """Every split with the tile in use, then the other tiles with the best split."""
    longest = max(SPLITS[0], context)
    found = [_tile_us(memory, q, mine, split) for split in SPLITS if split <= longest]
    best = fastest(found)
    split = found[0]["split"] if best is None else best["split"]
    return found + [_tile_us(memory, q, tile, split) for tile in TILES]


def fastest(found: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The entry that took the least time, of those that ran."""
    ran = [each for each in found if isinstance(each["us"], float)]
    return min(ran, key=lambda each: float(each["us"]), default=None)


def _tile_us(memory: Paged, q: Tensor, tile: Tile, split: int) -> dict[str, Any]:
    out, factor = torch.empty_like(q), SCALE * math.log2(math.e)
    calls: list[Call] = [
        partial(gpu.launch_decode, q, k, v, batch, out, factor, None, tile, split)
        for k, v, batch in memory.places()
    ]
    us = peer_us(calls)
    wrong = distance(out, _public(memory, q)[-1]()) > TOLERANCE
    return {
        **{"keys": tile.keys, "warps": tile.warps, "stages": tile.stages},
        **{"split": split, "us": "wrong" if wrong and isinstance(us, float) else us},
    }


def _sdpa(batch: int, context: int, count: int, q: Tensor) -> list[Call]:
    """torch's attention on contiguous keys and values: what a gather would have to precede."""
    shape = (batch, KV_HEADS, context, DIM)
    count = min(count, max(1, 2**34 // (batch * context * TOKEN_BYTES)))
    pairs = [
        [torch.randn(shape, dtype=q.dtype, device=DEVICE) for _ in range(2)] for _ in range(count)
    ]
    return [
        partial(scaled_dot_product_attention, q[:, :, None], k, v, scale=SCALE, enable_gqa=True)
        for k, v in pairs
    ]


def _short(value: float | str) -> str:
    return f"{value:.1f}" if isinstance(value, float) else "none"


def _describe(best: dict[str, Any]) -> str:
    return (
        f"{best['us']:.1f} us: keys {best['keys']} warps {best['warps']} stages "
        f"{best['stages']} split {best['split']}"
    )
