"""Which configuration multiplies how many rows by which weight: the nearest measured one."""

from dataclasses import replace
from functools import cache
from math import log2

from kernels.nf4.gemm import GemmConfig, fits
from kernels.nf4.tuned import TUNED

FUSED_ROWS = 256
"""With more rows, expanding the weight first and multiplying by the library's kernel is faster."""
FIELDS = ("tiles", "rows", "blocks", "ways", "split", "warps", "stages", "scale_weights")
"""Fields of GemmConfig, in the order of a row of TUNED."""
_BUCKETS = sorted({rows for rows, _, _ in TUNED})


@cache
def choose(rows: int, features: int, blocks: int) -> GemmConfig:
    """Return the configuration for [rows, 64 blocks] x [features, 64 blocks]^T.

    Of the measured numbers of rows the next one from `rows` up, of the measured weights the nearest
    in shape whose step divides `blocks`. Raises ValueError beyond FUSED_ROWS.
    """
    if not 0 < rows <= FUSED_ROWS:
        raise ValueError(f"rows must be in 1..{FUSED_ROWS}, got {rows}")
    bucket = next(size for size in _BUCKETS if size >= rows)
    fitting = [
        (abs(log2(features / n)) + abs(log2(blocks * 64 / k)), config)
        for size, (n, k), values in TUNED
        if size == bucket and blocks % (config := as_config(values)).step == 0
    ]
    if not fitting:
        return GemmConfig(tiles=4, rows=min(bucket, 64))  # steps of 4 blocks fit every weight
    config = min(fitting, key=lambda pair: pair[0])[1]
    return config if fits(rows, features, config) else replace(config, split=1)


def as_config(values: tuple[int, ...]) -> GemmConfig:
    """Return the configuration of a row of TUNED."""
    fields = dict(zip(FIELDS[:-1], values[:-1], strict=True))
    return GemmConfig(**fields, scale_weights=bool(values[-1]))


__all__ = ["FIELDS", "FUSED_ROWS", "as_config", "choose"]
