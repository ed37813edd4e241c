"""Decode: batches x contexts, in one launch and in steps, beside torch's own attention."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kernels.attention import AttentionBatch, gpu
from kernels.attention.decode import NewRows, launch_decode
from kernels.attention.tiles import PROGRAMS, DecodeTile, decode_splits, decode_tile
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
from launch.bench.attention.timing import BEYOND_L2, DEVICE, peer_us
from launch.bench.graphs import Call, graph_us

SCALE = DIM**-0.5
CASES = (
    *((1, context) for context in (128, 1024, 4096)),
    *((32, context) for context in (180, 1024, 4096)),
    *((256, context) for context in (128, 180, 1024)),
)
"""(sequences, context)."""
TILES = [
    DecodeTile(keys=keys, warps=warps, stages=stages, min_split=256)
    for keys, warps, stages in (
        *((32, 4, 3), (32, 4, 4), (64, 4, 2), (64, 4, 3), (64, 8, 3), (128, 4, 2), (128, 8, 2)),
        (256, 8, 2),
    )
]


def decode_table(every_tile: bool) -> list[dict[str, Any]]:
    """Print and return a line a (batch, context)."""
    print(f"\ndecode, {Q_HEADS} query heads on {KV_HEADS} KV heads of {DIM}, us")
    print(
        "batch context | rotate_attend   TB/s | rotate_store, attention |  sdpa alone | best tile"
    )
    rows = []
    for batch, context in CASES:
        rows.append(_case(batch, context, every_tile))
        torch.cuda.empty_cache()
    return rows


def _case(batch: int, context: int, every_tile: bool) -> dict[str, Any]:
    bytes_read = batch * context * TOKEN_BYTES
    sets = min(64, max(1, math.ceil(BEYOND_L2 / (bytes_read * LAYERS))))
    bound = 1024 if context <= 1024 else 4096  # as graphs are captured for
    memory = paged(1, [context] * batch, sets, bound=bound)
    heads = torch.randn(batch, Q_HEADS + 2 * KV_HEADS, DIM, device=DEVICE).bfloat16()
    q, k, v = torch.split(heads, [Q_HEADS, KV_HEADS, KV_HEADS], 1)
    new = NewRows(
        k=k,
        v=v,
        cos_sin=torch.randn(bound, DIM, device=DEVICE),
        positions=torch.full((batch,), context - 1, device=DEVICE),
        norms=None,
    )
    row: dict[str, Any] = {"batch": batch, "context": context}
    row["us"] = graph_us(_calls(_fused, memory, q, new))
    row["tb_s"] = bytes_read / row["us"] / 1e6
    row["steps_us"] = graph_us(_calls(_steps, memory, q, new))
    row["sdpa_us"] = peer_us(_sdpa(batch, context, sets * LAYERS, queries(batch)))
    row["tiles"] = _search(memory, q, new) if every_tile else []
    best = fastest(row["tiles"])
    print(
        f"{batch:5} {context:7} | {row['us']:13.1f} {row['tb_s']:6.2f} | {row['steps_us']:23.1f} | "
        f"{_short(row['sdpa_us']):>11} | {'' if best is None else _describe(best)}",
        flush=True,
    )
    return row


def _calls(op: Callable[..., Tensor], memory: Paged, q: Tensor, new: NewRows) -> list[Call]:
    return [partial(op, q, new, *place) for place in memory.places()]


def _fused(q: Tensor, new: NewRows, k: Tensor, v: Tensor, batch: AttentionBatch) -> Tensor:
    return gpu.rotate_attend(
        *(q, new.k, new.v, k, v, new.cos_sin, new.positions, batch),
        **{"norms": None, "scale": SCALE, "window": None},
    )


def _steps(q: Tensor, new: NewRows, k: Tensor, v: Tensor, batch: AttentionBatch) -> Tensor:
    q = gpu.rotate_store(q, new.k, new.v, k, v, new.cos_sin, new.positions, batch, norms=None)
    return gpu.paged_attention(q, k, v, batch, scale=SCALE, window=None)


def _search(memory: Paged, q: Tensor, new: NewRows) -> list[dict[str, Any]]:
    """Several splits with the tile in use, then the other tiles with the best of them."""
    pairs, bound = len(q) * KV_HEADS, memory.batches[0].max_context
    mine = decode_tile(pairs, bound, DIM, 2)
    limit = decode_splits(pairs, bound, mine)
    found = [_tile_us(memory, q, new, mine, n) for n in {limit, -(-limit // 2), -(-limit // 4), 1}]
    best = fastest(found)
    splits = limit if best is None else int(best["splits"])
    return found + [_tile_us(memory, q, new, tile, splits) for tile in TILES]


def fastest(found: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The entry that took the least time, of those that ran."""
    ran = [each for each in found if isinstance(each["us"], float)]
    return min(ran, key=lambda each: float(each["us"]), default=None)


def _tile_us(
    memory: Paged, q: Tensor, new: NewRows, tile: DecodeTile, splits: int
) -> dict[str, Any]:
    assert splits == 1 or len(q) * KV_HEADS * splits <= PROGRAMS
    out, factor = torch.empty_like(q).contiguous(), SCALE * gpu.LOG2_E
    calls: list[Call] = [
        partial(launch_decode, q, k, v, batch, out, factor, None, tile, splits, new)
        for k, v, batch in memory.places()
    ]
    us = peer_us(calls)
    wrong = distance(out, _fused(q, new, *memory.places()[-1])) > TOLERANCE
    return {
        **dataclasses.asdict(tile),
        "splits": splits,
        "us": "wrong" if wrong and isinstance(us, float) else us,
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
    return " ".join(f"{name} {value}" for name, value in best.items())
