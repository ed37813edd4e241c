"""Which configuration multiplies how many rows by which weight: the nearest measured one."""

from dataclasses import replace
from functools import cache
from math import log2

from kernels.nf4.gemm import GemmConfig, fits
from kernels.nf4.tuned import TUNED, WIDE
from kernels.nf4.wide_config import WideConfig
from kernels.sizes import HOPPER_ROOM

FUSED_ROWS = 256
"""With more rows, expanding the weight first and multiplying by the library's kernel is faster."""
FIELDS = ("tiles", "rows", "blocks", "ways", "split", "warps", "stages", "scale_weights")
"""Fields of GemmConfig, in the order of a row of TUNED."""
WIDE_FIELDS = ("rows", "tiles", "warps", "blocks", "stages", "programs", "table")
"""Fields of WideConfig, in the order of a row of WIDE."""
_BUCKETS = sorted({rows for rows, _, _ in TUNED})


@cache
def choose(rows: int, features: int, blocks: int, room: int = HOPPER_ROOM) -> GemmConfig:
    """Return the configuration for [rows, 64 blocks] x [features, 64 blocks]^T.

    Of the measured numbers of rows the next one from `rows` up, of the measured weights the nearest
    in shape whose step divides `blocks` and fits into `room` of shared memory. Raises ValueError
    beyond FUSED_ROWS.
    """
    bucket = _bucket(rows)
    fitting = [
        (_distance(features, blocks, shape), config)
        for size, shape, values in TUNED
        if size == bucket
        and blocks % (config := as_config(values)).step == 0
        and config.shared <= room
    ]
    # Some steps are of 2 or 4 blocks, which divide those of any packed weight.
    config = min(fitting, key=lambda pair: pair[0])[1]
    return config if fits(rows, features, config) else replace(config, split=1)


@cache
def choose_wide(rows: int, features: int, blocks: int) -> WideConfig | None:
    """Return the configuration of `wide.multiply_wide` where that was the faster one.

    Of the same measured rows and the nearest measured weight; None where it wasn't.
    """
    bucket = _bucket(rows)
    nearest = min(
        (shape for size, shape, _ in TUNED if size == bucket),
        key=lambda shape: _distance(features, blocks, shape),
    )
    found = [values for size, shape, values in WIDE if (size, shape) == (bucket, nearest)]
    return as_wide_config(found[0]) if found else None


def as_config(values: tuple[int, ...]) -> GemmConfig:
    """Return the configuration of a row of TUNED."""
    fields = dict(zip(FIELDS[:-1], values[:-1], strict=True))
    return GemmConfig(**fields, scale_weights=bool(values[-1]))


def as_wide_config(values: tuple[int, ...]) -> WideConfig:
    """Return the configuration of a row of WIDE."""
    fields = dict(zip(WIDE_FIELDS[:-1], values[:-1], strict=True))
    return WideConfig(**fields, table=bool(values[-1]))


def _bucket(rows: int) -> int:
    if not 0 < rows <= FUSED_ROWS:
        raise ValueError(f"rows must be in 1..{FUSED_ROWS}, got {rows}")
    return next(size for size in _BUCKETS if size >= rows)


def _distance(features: int, blocks: int, shape: tuple[int, int]) -> float:
    return abs(log2(features / shape[0])) + abs(log2(blocks * 64 / shape[1]))


__all__ = [
    "FIELDS",
    "FUSED_ROWS",
    "WIDE_FIELDS",
    "as_config",
    "as_wide_config",
    "choose",
    "choose_wide",
]
