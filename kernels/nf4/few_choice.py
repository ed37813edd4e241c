"""Which configuration multiplies few rows by which weight: the nearest measured one."""

from functools import cache
from math import log2

from kernels.nf4.few_config import FewConfig
from kernels.nf4.tuned import FEW
from kernels.sizes import HOPPER_ROOM

FEW_FIELDS = ("tiles", "pairs", "warps", "split", "programs")
"""Fields of FewConfig, in the order of a row of FEW."""
FUSED_NORM_ROWS = 1
"""Up to so many rows each program normalises x itself; with more a launch takes less time."""


@cache
def choose_few(rows: int, features: int, blocks: int, room: int = HOPPER_ROOM) -> FewConfig | None:
    """Return the configuration for [rows, 64 blocks] x [features, 64 blocks]^T, if there is one.

    Of the measured numbers of rows the next one from `rows` up, of the measured weights the nearest
    in shape whose share of x fits into `room` of shared memory.
    """
    bucket = min((size for size, _, _ in FEW if size >= rows), default=0)
    fitting = [
        (abs(log2(features / n)) + abs(log2(blocks * 64 / k)), values)
        for size, (n, k), values in FEW
        if size == bucket and 0 < as_few_config(values).shared(rows, blocks) <= room
    ]
    return as_few_config(min(fitting)[1]) if fitting else None


def as_few_config(values: tuple[int, ...]) -> FewConfig:
    """Return the configuration of a row of FEW."""
    return FewConfig(**dict(zip(FEW_FIELDS, values, strict=True)))


__all__ = ["FEW_FIELDS", "FUSED_NORM_ROWS", "as_few_config", "choose_few"]
