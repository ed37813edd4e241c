"""Sampling on CUDA, without a sort of the vocabulary."""

from functools import cache

import torch
from torch import Tensor

from kernels.checks import reject
from kernels.sampling import DrawParams, Penalties
from kernels.sampling.best_kernel import best_kernel
from kernels.sampling.checks import (
    check_draw,
    check_logits,
    check_penalise,
    check_rows,
    check_slots,
    check_width,
)
from kernels.sampling.draw_kernel import draw_kernel, weigh_kernel
from kernels.sampling.penalise_kernel import penalise_kernel
from kernels.sampling.select_kernel import MAX_SUM
from kernels.sampling.top_kernel import log_total_kernel, top_kernel
from kernels.sizes import power_of_two

_PROGRAMS = 1024
"""Programs that a launch should have, as far as a part of a row is worth one."""
_PARTS = (1024, 16384)
"""Smallest and largest part of a row that a program takes, in columns."""
_BLOCK = 2048
_LANES = 256
MOST_COLUMNS = _LANES * MAX_SUM
"""Of logits that candidates are sought in, or tokens drawn from."""
_LISTED = 2048
_PART_LANES = 128
_TILE = 4096
_SHIFTS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}
"""Low bits of the float32 that a dtype never sets."""
_MAX_ROWS = 1 << 14
_PARTIAL = 1 << 16


def greedy(logits: Tensor, first_id: int, slots: Tensor, last_token: Tensor) -> Tensor:
    """See `kernels.sampling.Greedy`."""
    check_logits(logits)
    check_slots(logits, slots, last_token)
    if not last_token.is_contiguous():
        reject("last_token", "contiguous", last_token)
    return _best(logits, first_id, slots.contiguous(), last_token)


def best_keys(
    logits: Tensor, first_id: int, width: int, *, lanes: int = _LANES, listed: int = _LISTED
) -> Tensor:
    """See `kernels.sampling.BestKeys`; ``lanes`` and ``listed`` as in `draw`."""
    check_logits(logits)
    check_width(width)
    rows, columns = logits.shape
    if width == 1:
        return _best(logits, first_id, None, None)
    _check_columns(logits, lanes)
    out = torch.empty((rows, width + 1), dtype=torch.int64, device=logits.device)
    if rows:
        padded = power_of_two(width)
        found = torch.empty((rows, padded), dtype=torch.int64, device=logits.device)
        top_kernel[(rows,)](
            logits, logits.new_empty((rows, listed), dtype=torch.int64), found, out,
            columns, logits.stride(0), first_id, width,
            WIDTH=padded, **_sizes(logits, lanes, listed),
        )  # fmt: skip
    return out


def log_total(logits: Tensor, rows: Tensor, *, lanes: int = _LANES) -> Tensor:
    """See `kernels.sampling.LogTotal`; ``lanes`` as in `draw`."""
    check_logits(logits)
    check_rows(rows)
    _check_adjacent(logits)
    out = torch.empty(rows.shape[0], dtype=torch.float64, device=logits.device)
    if rows.shape[0]:
        log_total_kernel[rows.shape](
            logits, rows.contiguous(), out, logits.shape[1], logits.stride(0),
            LANES=lanes, num_warps=_warps(lanes),
        )  # fmt: skip
    return out


def penalise(
    logits: Tensor, prompt_seen: Tensor, output_counts: Tensor, penalties: Penalties
) -> None:
    """See `kernels.sampling.Penalise`."""
    check_penalise(logits, prompt_seen, output_counts, penalties)
    _check_adjacent(logits)
    for name, tensor in (("prompt_seen", prompt_seen), ("output_counts", output_counts)):
        if not tensor.is_contiguous():
            reject(name, "contiguous", tensor)
    count, columns = penalties.rows.shape[0], logits.shape[1]
    if count * columns:
        penalise_kernel[(-(-columns // _BLOCK), count)](
            logits, prompt_seen.view(torch.uint8), output_counts,
            penalties.rows.contiguous(), penalties.slots.contiguous(),
            penalties.factors.contiguous(), columns, logits.stride(0),
            # Rounded after each operation, as on other devices.
            BLOCK=_BLOCK, num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip


def draw(
    logits: Tensor,
    rows: Tensor,
    top: Tensor,
    params: DrawParams,
    *,
    lanes: int = _LANES,
    listed: int = _LISTED,
) -> Tensor:
    """See `kernels.sampling.Draw`; ``lanes`` and ``listed``: logits of a tile by eights, and of
    the list that ends a search."""
    check_draw(logits, rows, top, params)
    count, columns = rows.shape[0], logits.shape[1]
    out = torch.empty_like(rows)
    if not count:
        return out
    _check_columns(logits, lanes)
    part = part_size(count, columns)
    parts = -(-columns // part)
    sums = torch.empty((count, parts, 17), dtype=torch.int64, device=logits.device)
    given = [
        tensor.contiguous()
        for tensor in (
            rows, top, params.temperature, params.top_k, params.top_p, params.min_p, params.uniform
        )
    ]  # fmt: skip
    sizes = _sizes(logits, lanes, listed)
    weigh_kernel[(parts, count)](
        logits, *given[:-1], sums, columns, logits.stride(0), part,
        SHIFT=sizes["SHIFT"], LANES=min(lanes, _PART_LANES), num_warps=_warps(_PART_LANES),
    )  # fmt: skip
    draw_kernel[(count,)](
        logits, *given, sums, torch.empty((count, listed), dtype=torch.int64, device=logits.device),
        out, columns, logits.stride(0), part, parts, BLOCK_PARTS=power_of_two(parts), **sizes,
    )  # fmt: skip
    return out


def _best(logits: Tensor, first_id: int, slots: Tensor | None, last_token: Tensor | None) -> Tensor:
    rows, columns = logits.shape
    out = torch.empty((rows, 2), dtype=torch.int64, device=logits.device)
    _check_adjacent(logits)
    if not rows:
        return out
    part = part_size(rows, columns)
    splits = max(1, -(-columns // part))
    block = min(part, _BLOCK)
    partial, arrived = _workspace(logits.device)
    if splits > 1 and (rows > _MAX_ROWS or rows * splits > _PARTIAL):
        raise ValueError(f"logits must have fewer rows, got {rows} of {columns} columns")
    best_kernel[(splits, rows)](
        logits, partial, arrived, out, slots, last_token, columns, logits.stride(0), first_id,
        STEPS=part // block, BLOCK=block, SPLITS=splits, BLOCK_SPLITS=power_of_two(splits),
        HAS_SLOTS=slots is not None, num_warps=4,
    )  # fmt: skip
    return out


def _sizes(logits: Tensor, lanes: int, listed: int) -> dict[str, int]:
    """What the kernels of one program a row are compiled for."""
    if listed > MAX_SUM:
        raise ValueError(f"listed must be at most {MAX_SUM}, got {listed}")
    tile = min(_TILE, 8 * power_of_two(-(-max(1, logits.shape[1]) // 8)))
    return {
        "SHIFT": _SHIFTS[logits.dtype],
        "LANES": lanes,
        "LIST": listed,
        "TILE": max(tile, 32) if lanes >= 128 else 8 * lanes,
        "num_warps": _warps(lanes),
    }


def _warps(lanes: int) -> int:
    return max(1, lanes // 32)


def _check_columns(logits: Tensor, lanes: int) -> None:
    if logits.shape[1] > lanes * MAX_SUM:
        reject("logits", f"of at most {lanes * MAX_SUM} columns", logits)
    _check_adjacent(logits)


def _check_adjacent(logits: Tensor) -> None:
    if logits.stride(1) != 1 and logits.numel():
        reject("logits", "of adjacent columns", logits)


def part_size(rows: int, columns: int) -> int:
    """Columns of one program."""
    return min(max(power_of_two(-(-rows * columns // _PROGRAMS)), _PARTS[0]), _PARTS[1])


@cache
def _workspace(device: torch.device) -> tuple[Tensor, Tensor]:
    """Keys of parts, and arrivals, which every launch leaves at zero."""
    partial = torch.empty(_PARTIAL, dtype=torch.int64, device=device)
    return partial, torch.zeros(_MAX_ROWS, dtype=torch.int32, device=device)


__all__ = ["MOST_COLUMNS", "best_keys", "draw", "greedy", "log_total", "penalise"]
