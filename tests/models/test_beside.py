"""Deltas that are made beside a projection are added by whoever reads it."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels import DenseWeight, LoraBatch, LoraTarget
from tests.models.test_affine import COMM, OPS, batch, column, sites
from tp_engine.layers import MLP, ColumnParallel, RowParallel, sum_add_norm


@pytest.fixture(autouse=True)
def _one_seed() -> None:
    torch.manual_seed(0)


def beside(
    base: Callable[[], Tensor], x: Tensor, lora: LoraBatch, target: LoraTarget
) -> tuple[Tensor, Tensor]:
    y = base()
    delta = torch.full_like(y, -0.0)
    OPS.lora_add_(delta, x, lora, target)
    return y, delta


APART = replace(OPS, lora_beside=beside)


def test_a_projection_leaves_its_delta_to_the_reader() -> None:
    layer, x = column(OPS, None), torch.randn(7, 64)
    apart = replace(layer, ops=APART)(x, batch(affine=False))
    assert apart.delta is not None and bool(apart.delta.any())
    torch.testing.assert_close(apart.total(), layer(x, batch(affine=False)).total())
    rows = torch.tensor([6, 0, 3])
    assert torch.equal(apart.of_rows(rows).total(), apart.total()[rows])
    for lora in (None, batch(affine=True)):
        assert replace(layer, ops=APART)(x, lora).delta is None


@pytest.mark.parametrize("world", [1, 2])
def test_the_mlp_and_the_norm_behind_it_add_what_they_read(
    world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    comm = replace(COMM, world=world)
    monkeypatch.setattr(type(comm), "all_reduce", lambda self, x: x)
    weights = [DenseWeight(weight=torch.randn(n, k)) for n, k in ((192, 64), (64, 96))]
    x, residual, norm = torch.randn(7, 64), torch.randn(7, 64), torch.randn(64)
    results = []
    for ops in (OPS, APART):
        gate_up = ColumnParallel(weights=(weights[0],), bias=None, lora=sites(0, 0), ops=ops)
        down = RowParallel(weight=weights[1], bias=None, lora=sites(3), ops=ops, comm=comm)
        part = MLP(gate_up=gate_up, down=down, ops=ops).of_rows(x, batch(affine=False))
        assert (part.delta is None) == (ops is OPS)
        results.append(sum_add_norm(part, residual, norm, 1e-5, ops=ops, comm=comm))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)
