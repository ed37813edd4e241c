"""Weights (dense or NF4) and the ops that read them.

Legend: T rows of a step, K in-features, N out-features (local to the rank), M blocks a row touches.

NF4 is the 4-bit "normal float" of QLoRA (Dettmers et al. 2023) as bitsandbytes stores it: blocks of
`blocksize` values run over the row-major flattened weight, each value is `NF4_CODE[code] * absmax`
of its block. A rank's shard keeps every code and every expanded absmax as they are, so shards of
any world size put together equal the whole bit for bit.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kernels.nf4.packed_weight import PackedNF4

NF4_CODE: tuple[float, ...] = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class NF4Weight:
    """The canonical NF4 shard of a weight [N, K]: codes re-aligned per row, absmax expanded.

    Raises ValueError, naming the field, when a shape, a dtype or a phase doesn't fit.
    """

    codes: Tensor
    """uint8 [N, ceil(K / 2)]; element 2i of a row in the high nibble, 2i + 1 in the low one."""
    absmax: Tensor
    """float32 [N, M], one per (row, touched block); places a row doesn't touch are never read. Any
    finite number: those that were quantised themselves come out a little below zero at times."""
    phase: Tensor
    """int32 [N], offset of a row's first element in its block: element j of row n is scaled by
    absmax[n, (phase[n] + j) // blocksize]."""
    columns: int
    """K; the packed shape can't tell an odd K from the even one above it."""
    blocksize: int = 64
    """Values a block."""
    dense: Tensor | None = None
    """[N, K], an optional de-quantised copy, in the layout that is multiplied fastest: CPU only,
    where 4 bits save space but not time."""

    def __post_init__(self) -> None:
        rows = self.phase.shape[0] if self.phase.ndim == 1 else -1
        if rows < 0 or self.phase.dtype != torch.int32:
            raise ValueError(f"phase must be int32 [N], got {_describe(self.phase)}")
        if self.blocksize < 1 or self.columns < 0:
            raise ValueError(
                f"blocksize must be >= 1 and columns >= 0, got {self.blocksize}, {self.columns}"
            )
        packed = (rows, (self.columns + 1) // 2)
        if self.codes.dtype != torch.uint8 or tuple(self.codes.shape) != packed:
            raise ValueError(f"codes must be uint8 {packed}, got {_describe(self.codes)}")
        if self.absmax.dtype != torch.float32 or self.absmax.shape[:-1] != (rows,):
            raise ValueError(f"absmax must be float32 [{rows}, M], got {_describe(self.absmax)}")
        if self.dense is not None and tuple(self.dense.shape) != self.shape:
            raise ValueError(f"dense must be {self.shape}, got {_describe(self.dense)}")
        self._check_phase()

    def _check_phase(self) -> None:
        if self.phase.numel() == 0 or self.columns == 0:
            return
        low, high = (int(v) for v in torch.aminmax(self.phase))
        if low < 0 or high >= self.blocksize:
            raise ValueError(f"phase must be in [0, {self.blocksize}), got {low}..{high}")
        needed = -(-(high + self.columns) // self.blocksize)
        if self.absmax.shape[1] < needed:
            raise ValueError(
                f"absmax must have at least {needed} columns for {self.columns} values that begin "
                f"at phase {high}, got {self.absmax.shape[1]}"
            )

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return (self.phase.shape[0], self.columns)

    @property
    def out_features(self) -> int:
        """N."""
        return self.phase.shape[0]

    @property
    def in_features(self) -> int:
        """K."""
        return self.columns

    @property
    def nbytes(self) -> int:
        """Bytes of the packed form; `dense` isn't counted."""
        return self.codes.nbytes + self.absmax.nbytes + self.phase.nbytes


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DenseWeight:
    """A weight kept as it is: modules that a checkpoint left out of quantisation."""

    weight: Tensor
    """Floating point [N, K]."""
    fast: Tensor | None = None
    """[N, K], an optional copy in the layout that the device multiplies fastest."""

    def __post_init__(self) -> None:
        if self.weight.ndim != 2 or not self.weight.is_floating_point():
            raise ValueError(f"weight must be floating point [N, K], got {_describe(self.weight)}")

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return (self.weight.shape[0], self.weight.shape[1])

    @property
    def out_features(self) -> int:
        """N."""
        return self.weight.shape[0]

    @property
    def in_features(self) -> int:
        """K."""
        return self.weight.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of the weight."""
        return self.weight.nbytes


Weight = DenseWeight | NF4Weight | PackedNF4


class Linear(Protocol):
    """The base projection."""

    def __call__(self, x: Tensor, w: Weight, bias: Tensor | None = None) -> Tensor:
        """Project rows.

        Semantics: y = x @ w.T + bias, summed in float32, rounded once to x.dtype. An NF4 weight
        takes part as `dequantize(w, x.dtype)`.

        x [T, K] floating point; w [N, K]; bias [N] or None; returns a new [T, N] in x.dtype. T, K
        and N may be 0; with K = 0 the result is the bias or zeros. Raises ValueError, naming the
        argument, on a wrong shape or dtype.
        """
        ...


class NormLinear(Protocol):
    """Residual addition, norm and the projection behind it."""

    def __call__(
        self,
        x: Tensor,
        residual: Tensor,
        norm: Tensor,
        eps: float,
        w: Weight,
        bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Add, normalise and project rows.

        Semantics: n, total = add_rms_norm(x, residual, norm, eps); returns (linear(n, w, bias),
        total), with the rounding of these steps up to the order of sums.

        x, residual [T, K] of one dtype, norm [K]; w [N, K]; bias [N] or None. Returns new tensors.
        Raises ValueError as `AddRMSNorm` and `Linear`.
        """
        ...


class Prepare(Protocol):
    """What is done to a weight once, at load."""

    def __call__(self, w: Weight, dtype: torch.dtype) -> Weight:
        """Add to a weight what makes products with activations of ``dtype`` fast.

        Returns an equal weight, on CUDA a `PackedNF4` in place of an `NF4Weight` where it can be
        packed; on CPU memory may grow by a copy of [N, K] in ``dtype``.
        """
        ...


class Dequantize(Protocol):
    """NF4 to floating point."""

    def __call__(self, w: NF4Weight, dtype: torch.dtype) -> Tensor:
        """Expand a shard.

        Semantics: out[n, j] = NF4_CODE[code] * absmax in float32, then one cast to `dtype`.

        Returns a new [N, K]. `w.dense` is not read.
        """
        ...


class QuantizeBlocks(Protocol):
    """Floating point to NF4."""

    def __call__(self, flat: Tensor, blocksize: int = 64) -> tuple[Tensor, Tensor]:
        """Quantise a flattened weight, block by block.

        Semantics: absmax of each block; code = the nearest of NF4_CODE to value / absmax, with the
        rounding of bitsandbytes' CPU `quantize_4bit` (quant_type "nf4"), bit for bit.

        flat float32 [n], finite; returns (codes uint8 [ceil(n / 2)], high nibble first, and absmax
        float32 [ceil(n / blocksize)]). The last block may be short. Raises ValueError on another
        dtype or rank, on a value that isn't finite, or on a blocksize below 1.
        """
        ...


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


__all__ = [
    "NF4_CODE",
    "DenseWeight",
    "Dequantize",
    "Linear",
    "NF4Weight",
    "NormLinear",
    "PackedNF4",
    "Prepare",
    "QuantizeBlocks",
    "Weight",
]
