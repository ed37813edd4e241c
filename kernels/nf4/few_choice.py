"""Which configuration multiplies few rows by which weight: the nearest measured one."""

from functools import cache
from math import log2

from kernels.nf4.few_config import FewConfig

MEASURED: tuple[tuple[int, tuple[int, int], tuple[int, ...]], ...] = (
    (1, (6144, 4096), (1, 1, 8, 1, 528)),
    (1, (4096, 4096), (1, 1, 8, 1, 528)),
    (1, (28672, 4096), (1, 1, 8, 1, 528)),
    (1, (4096, 14336), (1, 2, 8, 1, 264)),
    (4, (6144, 4096), (1, 1, 8, 1, 264)),
    (4, (4096, 4096), (1, 1, 8, 1, 264)),
    (4, (28672, 4096), (1, 1, 8, 1, 264)),
    (4, (4096, 14336), (2, 1, 8, 2, 264)),
)
"""(rows, (features, columns), FIELDS), on one H200; with more rows `gemm` is as fast or faster."""
FIELDS = ("tiles", "pairs", "warps", "split", "programs")
"""Fields of FewConfig, in the order of a row of MEASURED."""
FUSED_NORM_ROWS = 1
"""Up to so many rows each program normalises x itself; with more a launch takes less time."""


@cache
def choose_few(rows: int, features: int, blocks: int) -> FewConfig | None:
    """Return the configuration for [rows, 64 blocks] x [features, 64 blocks]^T, if there is one.

    Of the measured numbers of rows the next one from `rows` up, of the measured weights the nearest
    in shape whose share of x fits into shared memory.
    """
    bucket = min((size for size, _, _ in MEASURED if size >= rows), default=0)
    fitting = [
        (abs(log2(features / n)) + abs(log2(blocks * 64 / k)), values)
        for size, (n, k), values in MEASURED
        if size == bucket and _config(values).buffers(rows, blocks)
    ]
    return _config(min(fitting)[1]) if fitting else None


def _config(values: tuple[int, ...]) -> FewConfig:
    return FewConfig(**dict(zip(FIELDS, values, strict=True)))


__all__ = ["FIELDS", "FUSED_NORM_ROWS", "MEASURED", "choose_few"]
