"""Weights quantised by bitsandbytes, cut exactly for any number of ranks.

Format, under a weight's name X (bitsandbytes, as transformers saves it): X packed codes in any
shape and storage type; X.absmax float32, or uint8 with X.nested_absmax and X.nested_quant_map;
X.quant_map float32 [16]; X.quant_state.bitsandbytes__nf4 JSON. See `sharding.quant_state`.
"""

from typing import Final

import torch

from kernels.nf4 import NF4_CODE, NF4Weight
from sharding.blocks import cut_packed
from sharding.checkpoint import Checkpoint
from sharding.header import CheckpointError
from sharding.quant_state import NestedState, QuantState, parse_quant_state
from sharding.stored import StoredTensor
from sharding.units import Span

__all__ = ["BnbTensor"]

_STATE: Final = ".quant_state.bitsandbytes__nf4"
_FP4_STATE: Final = ".quant_state.bitsandbytes__fp4"


class BnbTensor:
    """One 4-bit weight of a checkpoint: its scales in memory, its codes still in the file."""

    def __init__(
        self, name: str, packed: StoredTensor, state: QuantState, absmax: torch.Tensor
    ) -> None:
        """Use `from_checkpoint`, which checks what this takes for granted."""
        self.name = name
        self.state = state
        self.absmax = absmax
        self._packed = packed

    @staticmethod
    def is_quantized(ckpt: Checkpoint, name: str) -> bool:
        """Whether the checkpoint stores anything of a 4-bit state under the weight's exact name."""
        keys = (_STATE, _FP4_STATE, ".absmax", ".quant_map")
        return any(name + key in ckpt for key in keys)

    @classmethod
    def from_checkpoint(cls, ckpt: Checkpoint, name: str) -> "BnbTensor":
        """Read the state of the weight called ``name`` (ending in ``.weight``).

        Raises:
            CheckpointError: naming the tensor and the reason, if a part is missing, of the wrong
                size or type, not finite, or of an unsupported kind (FP4, other block sizes).
        """
        if name + _STATE not in ckpt and name + _FP4_STATE in ckpt:
            raise CheckpointError(f"{name}: quant_type=fp4 is not supported, must be nf4")
        try:
            state = parse_quant_state(bytes(_read(ckpt, name + _STATE, torch.uint8).tolist()))
            _check_code(_read(ckpt, name + ".quant_map", torch.float32))
            packed = ckpt.stored(name)
            elements = state.shape[0] * state.shape[1]
            _expect("packed bytes", packed.info.nbytes, (elements + 1) // 2)
            absmax = _read_absmax(ckpt, name, state)
        except ValueError as error:
            raise CheckpointError(f"{ckpt.directory}: {name}: {error}") from error
        return cls(name, packed, state, absmax)

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in] of the weight, from its quantisation state."""
        return self.state.shape

    @property
    def blocksize(self) -> int:
        """Elements a block."""
        return self.state.blocksize

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weight before quantisation."""
        return self.state.dtype

    def cut(self, rows: Span, cols: Span) -> NF4Weight:
        """Canonical shard of rows and columns: every code and every scale as in the whole.

        Reads only the rows' bytes, a bounded number at a time; blocks may cross rows and cuts.

        Raises:
            ValueError: if a span leaves the weight.
        """
        if rows.stop > self.shape[0] or cols.stop > self.shape[1]:
            raise ValueError(
                f"{self.name}: rows {rows.start}:{rows.stop}, cols {cols.start}:{cols.stop} "
                f"leave the shape {list(self.shape)}"
            )
        return cut_packed(
            self._packed.read_bytes,
            self.absmax,
            width=self.shape[1],
            rows=rows,
            cols=cols,
            blocksize=self.blocksize,
        )


def _read(ckpt: Checkpoint, name: str, dtype: torch.dtype, size: int | None = None) -> torch.Tensor:
    """A statistic as a flat tensor, checked for type and number of elements."""
    tensor = ckpt.read(name).flatten()
    if tensor.dtype != dtype:
        raise ValueError(f"{name} is {tensor.dtype}, must be {dtype}")
    if size is not None:
        _expect(f"elements of {name}", tensor.numel(), size)
    return tensor


def _expect(what: str, found: int, need: int) -> None:
    if found != need:
        raise ValueError(f"{what}: found {found}, need {need}")


def _check_code(quant_map: torch.Tensor) -> None:
    """The kernels know one code book only."""
    if not torch.equal(quant_map, torch.tensor(NF4_CODE)):
        raise ValueError("quant_map is not the NF4 code book")


def _read_absmax(ckpt: Checkpoint, name: str, state: QuantState) -> torch.Tensor:
    """Scales of all blocks, float32, nested ones expanded."""
    elements = state.shape[0] * state.shape[1]
    blocks = -(-elements // state.blocksize)
    nested_keys = [name + ".nested_absmax", name + ".nested_quant_map"]
    if state.nested is None and any(key in ckpt for key in nested_keys):
        raise ValueError("nested scales are stored, but quant_state has no nested keys")
    if state.nested is None:
        absmax = _read(ckpt, name + ".absmax", torch.float32, blocks)
    else:
        absmax = _expand_nested(ckpt, name, state.nested, blocks)
    if not bool(torch.isfinite(absmax).all()):
        raise ValueError("absmax is not finite")
    return absmax


def _expand_nested(ckpt: Checkpoint, name: str, state: NestedState, blocks: int) -> torch.Tensor:
    """nested_map[code] * nested_absmax[i // nested_blocksize] + offset.

    Two roundings in float32, product then sum, as bitsandbytes' ``dequantize_4bit`` does it.
    """
    codes = _read(ckpt, name + ".absmax", torch.uint8, blocks)
    code_book = _read(ckpt, name + ".nested_quant_map", torch.float32, 256)
    groups = -(-blocks // state.blocksize)
    scales = _read(ckpt, name + ".nested_absmax", torch.float32, groups)
    by_block = scales[torch.arange(blocks) // state.blocksize]
    return code_book[codes.long()] * by_block + torch.tensor(state.offset, dtype=torch.float32)
