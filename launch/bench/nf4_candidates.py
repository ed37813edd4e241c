"""Configurations of the NF4 products that are worth a try."""

from kernels.nf4.choice import as_config, as_wide_config
from kernels.nf4.few_choice import as_few_config
from kernels.nf4.few_config import FewConfig
from kernels.nf4.gemm import GemmConfig
from kernels.nf4.wide_config import WideConfig
from kernels.sizes import power_of_two

_FEW = [  # tiles, warps, ways, blocks, stages, splits; for rows up to 16
    (1, 1, 1, 2, 4, (4, 8)),
    (1, 2, 2, 2, 3, (1, 2)),
    (1, 2, 2, 2, 4, (1, 2, 4)),
    (1, 4, 4, 2, 4, (1, 2)),
    (2, 2, 1, 2, 3, (2, 4)),
    (2, 2, 1, 2, 4, (2, 4, 8)),
    (4, 2, 1, 2, 3, (2, 4, 8)),
    (4, 2, 1, 2, 4, (2, 4, 8)),
    (4, 4, 1, 2, 4, (1, 2, 4)),
]
_SOME = [  # for rows up to 64
    (4, 4, 1, 2, 3, (1, 2, 4, 8)),
    (4, 4, 1, 2, 4, (2, 4)),
    (8, 4, 1, 2, 3, (2, 4)),
    (8, 8, 1, 2, 3, (1, 2)),
    (8, 8, 1, 1, 4, (1, 2)),
]
_MANY = [  # and rows a program
    (4, 4, 128, 1, 4, (1, 2, 4)),
    (4, 4, 128, 2, 3, (1, 2)),
    (8, 8, 128, 1, 4, (1, 2)),
    (8, 8, 128, 2, 3, (1, 2, 4)),
    (8, 8, 256, 1, 4, (1, 2, 4)),
]
_WIDE = [  # `choice.WIDE_FIELDS`
    (16, 4, 4, 2, 6, 2, 1),
    (16, 8, 4, 2, 5, 2, 1),
    (16, 8, 8, 2, 4, 2, 1),
    (16, 8, 4, 2, 6, 2, 1),
    (16, 8, 4, 1, 8, 2, 1),
    (16, 8, 8, 1, 10, 2, 1),
    (16, 4, 4, 1, 12, 2, 1),
    (32, 4, 4, 2, 4, 2, 0),
    (32, 4, 4, 2, 4, 2, 1),
    (32, 8, 4, 1, 6, 2, 0),
    (32, 8, 4, 2, 4, 2, 1),
    (32, 8, 8, 2, 6, 1, 1),
    (64, 4, 4, 1, 5, 3, 0),
    (64, 4, 4, 1, 6, 2, 1),
    (64, 8, 4, 1, 5, 2, 1),
    (64, 8, 8, 2, 4, 1, 1),
    (128, 4, 4, 1, 4, 2, 0),
    (128, 8, 8, 1, 6, 1, 0),
    (128, 8, 8, 1, 6, 1, 1),
    (256, 8, 8, 1, 4, 1, 0),
    (256, 8, 8, 1, 3, 1, 1),
]
_FEWEST = [  # tiles, pairs, warps, splits, programs a processor; for rows up to 8
    (1, 1, 4, (1,), (4, 5)),
    (1, 1, 8, (1, 2), (2, 3, 4)),
    (1, 2, 8, (1, 2), (2, 3)),
    (2, 1, 8, (1, 2), (2, 3)),
    (1, 1, 16, (1,), (1, 2)),
    (2, 1, 16, (1, 2), (1,)),
]
_PROCESSORS = 132


def candidates(rows: int) -> list[GemmConfig]:
    """Return configurations of `gemm.multiply` for some rows of x."""
    found = []
    if rows > 64:
        for tiles, warps, bm, blocks, stages, splits in _MANY:
            if bm <= power_of_two(rows):
                found += [(tiles, bm, blocks, 1, split, warps, stages, True) for split in splits]
    else:
        bm = max(8, power_of_two(rows))
        for scaled in (False, True) if 16 < rows <= 32 else (rows > 32,):
            for tiles, warps, ways, blocks, stages, splits in _FEW if rows <= 16 else _SOME:
                found += [(tiles, bm, blocks, ways, s, warps, stages, scaled) for s in splits]
    return [as_config(values) for values in found]


def wide_candidates(rows: int) -> list[WideConfig]:
    """Return configurations of `wide.multiply_wide` for some rows of x."""
    most = max(16, power_of_two(rows))
    found = [as_wide_config(values) for values in _WIDE]
    return [c for c in found if c.rows == most or (most == 256 and c.rows == 128)]


def few_candidates(rows: int) -> list[FewConfig]:
    """Return configurations of `few.multiply_few` for some rows of x."""
    return [
        as_few_config((tiles, pairs, warps, split, each * _PROCESSORS))
        for tiles, pairs, warps, splits, programs in (_FEWEST if rows <= 8 else [])
        for split in splits
        for each in programs
    ]


__all__ = ["candidates", "few_candidates", "wide_candidates"]
