"""Unsharded tensors straight from the checkpoint's files, a run of rows at a time.

Nothing here cuts, packs or places: bytes are read where the file's format says they are, so that
what a rank holds is compared with something that did not go through the code under test.

Legend: N rows, K columns of the whole tensor (a vector is [N, 1]), n rows of a run.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import NF4_CODE, ops_for
from sharding import Checkpoint, Span, StoredTensor

_STATE = ".quant_state.bitsandbytes__nf4"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedWhole:
    """An NF4 weight as bitsandbytes stores it: flattened, blocks running over row ends."""

    shape: tuple[int, int]
    """(N, K)."""
    blocksize: int
    absmax: Tensor
    """float32, one a block, nested ones expanded."""
    read: Callable[[int, int], Tensor]
    """Packed bytes ``start:stop`` as uint8: element e in byte e // 2, the high half for even e."""

    def codes(self, rows: Span) -> Tensor:
        """uint8 [n, K], 0 to 15."""
        start, stop = self._elements(rows)
        raw = self.read(start // 2, (stop + 1) // 2)
        flat = torch.stack((raw >> 4, raw & 15), dim=-1).flatten()
        return flat[start % 2 :][: stop - start].view(rows.size, self.shape[1])

    def scales(self, rows: Span) -> Tensor:
        """float32 [n, K]: each element's absmax."""
        start, stop = self._elements(rows)
        first, last = start // self.blocksize, -(-stop // self.blocksize)
        flat = self.absmax[first:last].repeat_interleave(self.blocksize)
        return flat[start % self.blocksize :][: stop - start].view(rows.size, self.shape[1])

    def values(self, rows: Span, dtype: torch.dtype) -> Tensor:
        """[n, K]: code value times absmax in float32, then one cast."""
        code = torch.tensor(NF4_CODE)
        return (code[self.codes(rows).int()] * self.scales(rows)).to(dtype)

    def _elements(self, rows: Span) -> tuple[int, int]:
        return rows.start * self.shape[1], rows.stop * self.shape[1]


class WholeSource:
    """A checkpoint's tensors by name; at most one quantised one is kept at a time."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, *, quantize: bool) -> None:
        """Start with nothing read.

        Args:
            checkpoint: open.
            dtype: what plain tensors are cast to.
            quantize: whether plain weights of the layers' linears are quantised while loading.
        """
        self.dtype = dtype
        self._checkpoint = checkpoint
        self._quantize = quantize
        self._last: tuple[str, PackedWhole] | None = None

    def names(self) -> set[str]:
        """All weights, biases and norms; without the statistics of quantised weights, and without
        the rotary buffers that older files keep and none uses."""
        packed = {n.removesuffix(_STATE) for n in self._checkpoint.names if n.endswith(_STATE)}
        statistics = tuple(f"{name}." for name in packed)
        return {
            name
            for name in self._checkpoint.names
            if not name.startswith(statistics) and not name.endswith("rotary_emb.inv_freq")
        }

    def is_packed(self, name: str, *, linear: bool) -> bool:
        """Whether a rank must hold this weight as NF4; ``linear``: of a layer's linear module."""
        return name + _STATE in self._checkpoint or (self._quantize and linear)

    def shape(self, name: str) -> tuple[int, int]:
        """(N, K) of a plain tensor."""
        rows, *rest = self._checkpoint.shape(name)
        return rows, rest[0] if rest else 1

    def plain(self, name: str, rows: Span) -> Tensor:
        """[n, K] of a plain tensor in the compute dtype."""
        part = self._checkpoint.read_slice(name, rows).to(self.dtype)
        return part.reshape(rows.size, self.shape(name)[1])

    def packed(self, name: str) -> PackedWhole:
        """An NF4 weight: the stored one, or the plain one quantised whole."""
        if self._last is None or self._last[0] != name:
            stored = self._checkpoint.stored(name)
            quantized = name + _STATE in self._checkpoint
            self._last = (name, self._stored(name, stored) if quantized else _quantized(stored))
        return self._last[1]

    def _stored(self, name: str, packed: StoredTensor) -> PackedWhole:
        state = json.loads(bytes(self._flat(name + _STATE).tolist()))
        return PackedWhole(
            shape=(state["shape"][0], state["shape"][1]),
            blocksize=state["blocksize"],
            absmax=self._absmax(name, state.get("nested_blocksize"), state.get("nested_offset")),
            read=packed.read_bytes,
        )

    def _absmax(self, name: str, group: int | None, offset: float | None) -> Tensor:
        """bitsandbytes' ``dequantize_4bit``: code book value times group scale, plus offset."""
        absmax = self._flat(name + ".absmax")
        if group is None or offset is None:
            return absmax
        book = self._flat(name + ".nested_quant_map")
        scales = self._flat(name + ".nested_absmax").repeat_interleave(group)[: absmax.numel()]
        return book[absmax.int()] * scales + torch.tensor(offset, dtype=torch.float32)

    def _flat(self, name: str) -> Tensor:
        return self._checkpoint.read(name).flatten()


def _quantized(stored: StoredTensor, blocksize: int = 64) -> PackedWhole:
    values = stored.read().float().flatten()
    codes, absmax = ops_for(values.device).quantize_blocks(values, blocksize)
    return PackedWhole(
        shape=(stored.shape[0], stored.shape[1]),
        blocksize=blocksize,
        absmax=absmax,
        read=lambda start, stop: codes[start:stop],
    )
