"""Launches the NF4 product: checks, workspace, grid."""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from kernels.checks import reject
from kernels.nf4.gemm_kernel import nf4_gemm
from kernels.nf4.packed_weight import BLOCK, PackedNF4
from kernels.nf4.tables import prmt_table, value_table
from kernels.overlap import overlaps

_PARTIAL_SUMS = 1 << 23
_PROGRAMS = 1 << 14


@dataclass(frozen=True, kw_only=True, slots=True)
class GemmConfig:
    """How one product is cut up."""

    tiles: int
    """Tiles of 16 output features a program; a power of two, at most 8."""
    rows: int
    """Rows of x a program; a power of two, at least 8."""
    blocks: int = 4
    """Blocks of 64 columns a step of one way: 1 (with one way), 2 or 4."""
    ways: int = 1
    """Groups of warps that share the columns of a step."""
    split: int = 1
    """Programs that share the columns of one output."""
    warps: int = 4
    """Warps a program; with 4 or 8 and at least 4 tiles, Hopper multiplies by `wgmma`."""
    stages: int = 3
    """Steps whose loads are in flight."""
    scale_weights: bool = False
    """Scale weights before the product instead of partial sums after it."""

    def __post_init__(self) -> None:
        if self.tiles not in (1, 2, 4, 8):
            raise ValueError(f"tiles must be 1, 2, 4 or 8, got {self.tiles}")
        if self.blocks not in (1, 2, 4) or (self.blocks == 1 and self.ways > 1):
            raise ValueError(
                f"blocks must be 2 or 4, or 1 with one way, got {self.blocks} of {self.ways} ways"
            )
        if self.rows < 8 or self.rows & (self.rows - 1):
            raise ValueError(f"rows must be a power of two from 8 on, got {self.rows}")

    @property
    def by_warpgroups(self) -> bool:
        """Whether Triton picks `wgmma` on Hopper, which takes columns in their natural order."""
        return self.warps % 4 == 0 and self.tiles >= 4 and self.ways == 1

    @property
    def step(self) -> int:
        """Blocks of 64 columns a step of all ways."""
        return self.blocks * self.ways

    @property
    def shared(self) -> int:
        """Bytes of shared memory a program without `wgmma`: x and words of the steps in flight,
        weights and scales of one step and, by the compiler's version, some more."""
        flight = (self.stages - 1) * self.step * (128 * self.rows + 512 * self.tiles)
        return flight + self.tiles * (1024 + 1792 * self.step) + 4096


def multiply(x: Tensor, w: PackedNF4, bias: Tensor | None, config: GemmConfig) -> Tensor:
    """Return x W^T + bias as [T, N] in x.dtype.

    x [T, K] with adjacent columns. Weights take part as bfloat16(GAIN * code) * bfloat16(absmax),
    products in float32: within 2^-8 of each exact weight. With `scale_weights` the product of the
    two is rounded once more to bfloat16. T and N at least 1. Programs of one device share a
    workspace, so products that split columns must not run on two streams at a time.
    """
    if x.stride(1) != 1:
        reject("x", "of adjacent columns", x)
    if w.blocks % config.step:
        raise ValueError(f"config must divide {w.blocks} blocks into steps, got {config.step}")
    rows, features = x.shape[0], w.rows
    y = x.new_empty(rows, features)
    grid = (*_outputs(rows, features, config), config.split)
    if not fits(rows, features, config):
        raise ValueError(f"split must be 1 for so large an output, got {config.split}")
    partial, arrived = workspace(x.device)
    pdl = overlaps(x.device)
    use_prmt = x.is_cuda and x.dtype == torch.bfloat16
    nf4_gemm[grid](
        x,
        w.words,
        w.scales,
        prmt_table(x.device) if use_prmt else value_table(x.device, x.dtype),
        bias,
        y,
        partial,
        arrived,
        rows,
        features,
        w.columns,
        w.scales.shape[1],
        x.stride(0),
        w.blocks // config.step,
        TILES=config.tiles,
        BM=config.rows,
        BLOCKS=config.blocks,
        SPLIT=config.split,
        WAYS=config.ways,
        STAGES=config.stages,
        QUADS=not config.by_warpgroups,
        HAS_BIAS=bias is not None,
        EVEN_COLUMNS=w.columns == w.blocks * BLOCK,
        SCALE_WEIGHTS=config.scale_weights,
        USE_PRMT=use_prmt,
        USE_PDL=pdl,
        launch_pdl=pdl,
        num_warps=config.warps,
        num_stages=config.stages,
    )
    return y


def fits(rows: int, features: int, config: GemmConfig) -> bool:
    """Say whether the workspace holds the partial sums of a product."""
    across, down = _outputs(rows, features, config)
    sums = across * down * config.split * 16 * config.tiles * config.rows
    return config.split == 1 or has_room(across * down, sums)


def has_room(outputs: int, sums: int) -> bool:
    """Say whether the workspace holds the partial sums of so many outputs."""
    return sums <= _PARTIAL_SUMS and outputs <= _PROGRAMS


def _outputs(rows: int, features: int, config: GemmConfig) -> tuple[int, int]:
    return -(-rows // config.rows), -(-features // (16 * config.tiles))


@cache
def workspace(device: torch.device) -> tuple[Tensor, Tensor]:
    """Partial sums, and arrivals, which every launch leaves at zero."""
    partial = torch.empty(_PARTIAL_SUMS, dtype=torch.float32, device=device)
    return partial, torch.zeros(_PROGRAMS, dtype=torch.int32, device=device)


__all__ = ["GemmConfig", "OutOfResources", "fits", "has_room", "multiply", "workspace"]
