"""Gains and biases of adapters in the layers: who gets them, and who pays for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import DenseWeight, LoraBatch, LoraTarget, ops_for
from tests.kernels.affine_cases import SHAPE, affine_arena
from tp_engine.layers import MLP, ColumnParallel, LoraSites, RowParallel
from tp_engine.ranks.comm import Comm

OPS = ops_for(torch.device("cpu"))
COMM = Comm.alone(torch.device("cpu"))
COUNTS, WHO = [2, 1, 3, 1], [1, None, 3, 0]
ARENA = affine_arena()


class Counting:
    """The op, counted."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.calls += 1
        OPS.lora_affine_(*args, **kwargs)


def batch(*, affine: bool) -> LoraBatch:
    arena = ARENA
    segments = replace(arena.segments(COUNTS, WHO), affine=affine)
    return LoraBatch(arena=arena.data, descriptors=arena.descriptors, segments=segments)


def sites(*which: int) -> LoraSites:
    widths = [SHAPE.outputs[site] for site in which]
    starts = [sum(widths[:i]) for i in range(len(widths))]
    spans = tuple(zip(starts, widths, strict=True))
    return LoraSites(target=LoraTarget(layer=0, sites=which, num_sites=SHAPE.sites, spans=spans))


@pytest.fixture(autouse=True)
def _one_seed() -> None:
    torch.manual_seed(0)


def column(ops: Any, bias: Tensor | None) -> ColumnParallel:
    weight = DenseWeight(weight=torch.randn(168, 64))
    return ColumnParallel(weights=(weight,), bias=bias, lora=sites(0, 1, 2), ops=ops)


def peft(x: Tensor, weight: Tensor, bias: Tensor | None, which: tuple[int, ...]) -> Tensor:
    """PEFT's formula in float64 for every row."""
    arena, out, row = ARENA, [], 0
    for count, index in zip(COUNTS, WHO, strict=True):
        for t in range(row, row + count):
            parts, start = [], 0
            for site in which:
                rows = slice(start, start + SHAPE.outputs[site])
                start = rows.stop
                w, gain, own = weight[rows].double(), 1.0, 0.0
                factors = None if index is None else arena.adapters[index].get((0, site))
                if factors is not None:
                    w = w + factors.scale * (factors.b.double() @ factors.a.double())
                    gain = 1.0 if factors.gain is None else factors.gain.double()
                    own = 0.0 if factors.bias is None else factors.bias.double()
                base = 0.0 if bias is None else bias[rows].double()
                parts.append(gain * (w @ x[t].double()) + own + base)
            out.append(torch.cat(parts))
        row += count
    return torch.stack(out).float()


@pytest.mark.parametrize("biased", [False, True])
def test_a_column_parallel_layer_equals_pefts_formula(biased: bool) -> None:
    bias = torch.randn(168) if biased else None
    layer, x = column(OPS, bias), torch.randn(7, 64)
    found = layer(x, batch(affine=True)).total()
    expected = peft(x, layer.weights[0].weight, bias, (0, 1, 2))  # type: ignore[union-attr]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_row_parallel_layer_scales_its_part_and_the_first_rank_adds_the_bias(rank: int) -> None:
    bias, weight, x = torch.randn(64), torch.randn(64, 96), torch.randn(7, 96)
    layer = RowParallel(
        weight=DenseWeight(weight=weight),
        bias=bias,
        lora=sites(3),
        ops=OPS,
        comm=replace(COMM, rank=rank, world=2),
    )
    expected = peft(x, weight, bias if rank == 0 else None, (3,))
    found = layer(x, batch(affine=True)).total()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_steps_without_such_adapters_do_not_pay() -> None:
    counting = Counting()
    ops = replace(OPS, lora_affine_=counting)
    layer, x = column(ops, None), torch.randn(7, 64)
    layer(x, batch(affine=False))
    layer(x, None)
    assert counting.calls == 0
    layer(x, batch(affine=True))
    assert counting.calls == 1


@pytest.mark.parametrize("op", ["lora_silu_mul", "lora_beside"])
def test_the_activation_of_steps_with_such_adapters_takes_no_deltas(op: str) -> None:
    """What adds the deltas of gate and up on its way has no place for gains."""

    def fused(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("called")

    ops = replace(OPS, **{op: fused})
    gate_up = ColumnParallel(
        weights=(DenseWeight(weight=torch.randn(192, 64)),), bias=None, lora=sites(0, 0), ops=ops
    )
    down = RowParallel(
        weight=DenseWeight(weight=torch.randn(64, 96)),
        bias=None,
        lora=sites(3),
        ops=ops,
        comm=COMM,
    )
    mlp, x = MLP(gate_up=gate_up, down=down, ops=ops), torch.randn(7, 64)
    lora = batch(affine=True)
    expected = down(ops.silu_mul(gate_up(x, lora).total()), lora).total()
    torch.testing.assert_close(mlp.of_rows(x, lora).total(), expected)
    with pytest.raises(AssertionError, match="called"):
        mlp.of_rows(x, batch(affine=False))
