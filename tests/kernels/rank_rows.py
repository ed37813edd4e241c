"""Builds adapters in an arena of NaN, with their descriptor records."""

import random
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kernels.lora import LoraBatch, LoraSegments
from kernels.lora.tiles import tile_table

Site = tuple[int, int]  # (layer, site)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a model's sites."""

    layers: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    @property
    def sites(self) -> int:
        return len(self.inputs)


@dataclass(frozen=True, kw_only=True)
class Factors:
    """A [r, K], B [N, r] and the scale of one site; gain and bias are float32 [N] or None."""

    a: Tensor
    b: Tensor
    scale: float
    gain: Tensor | None = None
    bias: Tensor | None = None

    def rows(self) -> list[Tensor]:
        """All rows, in the order of a record's offsets."""
        return [*self.a, *self.b.T, *(row for row in (self.gain, self.bias) if row is not None)]


Adapter = Mapping[Site, Factors]


def make_adapter(shape: Shape, ranks: Mapping[Site, int]) -> Adapter:
    """Random factors; a site without a rank isn't targeted."""
    return {
        (layer, site): Factors(
            a=torch.randn(rank, shape.inputs[site]).to(shape.dtype),
            b=torch.randn(shape.outputs[site], rank).to(shape.dtype),
            scale=random.uniform(0.1, 2.0),
        )
        for (layer, site), rank in ranks.items()
    }


def with_affine(adapter: Adapter, kinds: Sequence[str]) -> Adapter:
    """The adapter with random rows: a kind a site, in turn, "gain", "bias", "both" or "none"."""
    return {
        place: replace(
            factors,
            gain=torch.rand(len(factors.b)) + 0.5 if kinds[i % len(kinds)] in GAINS else None,
            bias=torch.randn(len(factors.b)) if kinds[i % len(kinds)] in BIASES else None,
        )
        for i, (place, factors) in enumerate(adapter.items())
    }


GAINS, BIASES = ("gain", "both"), ("bias", "both")


def uniform(shape: Shape, rank: int) -> Adapter:
    """The same rank at every site."""
    sites = [(layer, site) for layer in range(shape.layers) for site in range(shape.sites)]
    return make_adapter(shape, dict.fromkeys(sites, rank))


@dataclass(frozen=True, kw_only=True)
class Arena:
    """Adapters in place."""

    shape: Shape
    data: Tensor
    descriptors: Tensor
    numbers: tuple[int, ...]
    adapters: tuple[Adapter, ...]

    def segments(self, counts: Sequence[int], who: Sequence[int | None]) -> LoraSegments:
        """Segments of `counts` rows, of adapters by place in `adapters`; None: base rows."""
        offsets = [sum(counts[:i]) for i in range(len(counts) + 1)]
        chosen = [self.adapters[w] for w in who if w is not None]
        return LoraSegments(
            offsets=torch.tensor(offsets, dtype=torch.int32),
            descriptors=torch.tensor(
                [-1 if w is None else self.numbers[w] for w in who], dtype=torch.int64
            ),
            max_rank=max((len(f.a) for adapter in chosen for f in adapter.values()), default=0),
        )

    def tiled(
        self, counts: Sequence[int], who: Sequence[int | None], capacity: int | None = None
    ) -> LoraSegments:
        """The same with tiles, padded to `capacity`."""
        segments = self.segments(counts, who)
        table = tile_table(np.array(counts, np.int64), segments.descriptors.numpy(), capacity)
        return replace(segments, tiles=torch.from_numpy(table))

    def batch(self, segments: LoraSegments) -> LoraBatch:
        """A step with these segments, on their device."""
        device = segments.descriptors.device
        return LoraBatch(
            arena=self.data.to(device), descriptors=self.descriptors.to(device), segments=segments
        )


def place(shape: Shape, adapters: Sequence[Adapter], *, scattered: bool = False) -> Arena:
    """Write adapters into an arena; `scattered` breaks every regular stride between rows."""
    rows: list[tuple[int, Tensor]] = []
    words: list[int] = [-99]  # no record begins at word 0
    numbers = []
    end = 32
    for adapter in adapters:
        lines = [row for f in adapter.values() for row in f.rows()]
        order = random.sample(range(len(lines)), len(lines)) if scattered else range(len(lines))
        offsets = [0] * len(lines)
        for index in order:
            offsets[index] = end
            gap = 16 * random.randint(0, 2) if scattered else 0
            end += -(-lines[index].nbytes // 16) * 16 + gap
        rows += zip(offsets, lines, strict=True)
        numbers.append(len(words))
        words += _record(shape, adapter, offsets)
    data = torch.full((end // 4 + 8,), float("nan")).view(torch.uint8)
    for offset, row in rows:
        packed = torch.empty(len(row), dtype=row.dtype).copy_(row)  # a stride of 1, whatever N
        data[offset : offset + row.nbytes] = packed.view(torch.uint8)
    return Arena(
        shape=shape,
        data=data,
        descriptors=torch.tensor(words, dtype=torch.int64),
        numbers=tuple(numbers),
        adapters=tuple(adapters),
    )


def _record(shape: Shape, adapter: Adapter, offsets: list[int]) -> list[int]:
    head = [0] * (2 * shape.layers * shape.sites)
    rows: list[int] = []
    first = len(head)
    for (layer, site), factors in adapter.items():
        at = 2 * (layer * shape.sites + site)
        head[at] = (first << 16) | len(factors.a)
        (head[at + 1],) = struct.unpack("<q", struct.pack("<d", factors.scale))
        taken = iter(offsets)
        rows += [next(taken) for _ in range(2 * len(factors.a))]
        rows += [-1 if row is None else next(taken) for row in (factors.gain, factors.bias)]
        offsets = list(taken)
        first = len(head) + len(rows)
    return head + rows
