"""Which configuration multiplies how many rows by which weight: the nearest measured one."""

from functools import cache
from math import log2

from kernels.nf4.gemm import GemmConfig
from kernels.nf4.tuned import TUNED

FUSED_ROWS = 256
"""With more rows, expanding the weight first and multiplying by the library's kernel is faster."""
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
        (abs(log2(features / n)) + abs(log2(blocks * 64 / k)), index)
        for index, (size, (n, k), config) in enumerate(TUNED)
        if size == bucket and blocks % (config.get("blocks", 4) * config.get("ways", 1)) == 0
    ]
    if not fitting:  # whole rows of 256 columns: steps of 4 blocks always fit
        return GemmConfig(tiles=4, rows=min(max(bucket, 8), 64), blocks=4, split=1, warps=4)
    return GemmConfig(**TUNED[min(fitting)[1]][2])


__all__ = ["FUSED_ROWS", "choose"]
