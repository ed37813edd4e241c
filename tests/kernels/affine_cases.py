"""What the tests of gains and biases share: adapters of every kind, and the formula."""

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.lora import LoraAffine, LoraSegments, LoraTarget
from tests.kernels.rank_rows import Arena, Shape, make_adapter, place, with_affine

SHAPE = Shape(layers=2, inputs=(64, 64, 64, 96), outputs=(96, 32, 40, 64))
QKV = (0, 1, 2)
SPANS = ((0, 96), (100, 32), (132, 40))
WIDTH = 175
"""Columns of y, some of which are no site's."""


def affine_arena(dtype: torch.dtype = torch.float32) -> Arena:
    """Eight adapters: plain ones, with gains, with biases, with both, with some of each."""
    random.seed(5)
    shape = Shape(layers=2, inputs=SHAPE.inputs, outputs=SHAPE.outputs, dtype=dtype)
    kinds: list[Sequence[str]] = [
        ("none",),
        ("gain",),
        ("bias",),
        ("both",),
        ("gain", "none", "bias"),
        ("none", "both"),
        ("gain",),
        ("bias", "gain"),
    ]
    adapters = []
    for index, kind in enumerate(kinds):
        sites = {(layer, site): 1 + index for layer in range(2) for site in range(4)}
        if index in (3, 6):
            del sites[0, 1]
        adapters.append(with_affine(make_adapter(shape, sites), kind))
    return place(shape, adapters, scattered=True)


def run(
    op: LoraAffine,
    arena: Arena,
    y: Tensor,
    segments: LoraSegments,
    bias: Tensor | None,
    *,
    layer: int = 0,
    sites: tuple[int, ...] = QKV,
    spans: tuple[tuple[int, int], ...] = SPANS,
) -> Tensor:
    """y after the op."""
    out = y.clone()
    target = LoraTarget(layer=layer, sites=sites, num_sites=SHAPE.sites, spans=spans)
    op(out, arena.batch(segments), target, bias)
    return out


def logical(
    arena: Arena,
    y: Tensor,
    bias: Tensor | None,
    counts: Sequence[int],
    who: Sequence[int | None],
    *,
    layer: int = 0,
    sites: tuple[int, ...] = QKV,
    spans: tuple[tuple[int, int], ...] = SPANS,
) -> tuple[Tensor, Tensor]:
    """The formula in float64, and bool [T, N]: where anything is applied."""
    out, applied, row = y.double(), torch.zeros(y.shape, dtype=torch.bool), 0
    base = torch.zeros(y.shape[1]) if bias is None else bias
    for count, index in zip(counts, who, strict=True):
        rows = slice(row, row + count)
        row += count
        for site, (start, width) in zip(sites, spans, strict=True):
            factors = None if index is None else arena.adapters[index].get((layer, site))
            if not width or factors is None or len(factors.rows()) == 2 * len(factors.a):
                continue
            columns = slice(start, start + width)
            c = base[columns].double()
            gain = 1.0 if factors.gain is None else factors.gain.double()
            own = 0.0 if factors.bias is None else factors.bias.double()
            out[rows, columns] = (out[rows, columns] - c) * gain + c + own
            applied[rows, columns] = True
    return out.to(y.dtype), applied
