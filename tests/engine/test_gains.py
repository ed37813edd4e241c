"""Gains of DoRA adapters: exact, whatever the cut, the form of the weight and its size."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import DenseWeight, NF4Weight, Weight, ops_for
from kernels.nf4.reference import dequantize
from kernels.nf4.slices import float_rows
from sharding import SITES, ModelDims, cut_model, weight_slice
from tests.adapters.writing import every_site, random_modules, revision_of
from tp_engine.adapters import AdapterImage, LoraModule, pack_adapter
from tp_engine.adapters.record import gain_places, gain_row
from tp_engine.tiers import gains
from tp_engine.tiers.gains import RankGains, gains_of, squared_norms

OPS = ops_for(torch.device("cpu"))
DIMS = ModelDims(
    layers=2, hidden=24, intermediate=72, heads=3, kv_heads=3, head_dim=8, vocab=64, mlp_unit=8
)
PAGE = 4096


def base_weights(seed: int = 0) -> dict[tuple[int, int], Tensor]:
    generator = torch.Generator().manual_seed(seed)
    (whole,) = cut_model(DIMS, 1)
    return {
        (layer, site): torch.randn(
            weight_slice(DIMS, cut, site).rows.size,
            weight_slice(DIMS, cut, site).cols.size,
            generator=generator,
        )
        for layer, cut in enumerate(whole.layers)
        for site in range(len(SITES))
    }


def shard(whole: dict[tuple[int, int], Tensor], cut: Any, *, fused: bool) -> Any:
    """What a rank holds, as `RankWeights` has it."""

    def held(layer: int, *sites: int) -> tuple[DenseWeight, ...]:
        parts = [weight_slice(DIMS, cut.layers[layer], site) for site in sites]
        members = [
            whole[layer, site][part.rows.slice, part.cols.slice]
            for site, part in zip(sites, parts, strict=True)
        ]
        if fused:
            members = [torch.cat(members)]
        return tuple(DenseWeight(weight=member) for member in members)

    layers = [
        SimpleNamespace(
            qkv=held(layer, 0, 1, 2),
            o=held(layer, 3)[0],
            gate_up=held(layer, 4, 5),
            down=held(layer, 6)[0],
        )
        for layer in range(DIMS.layers)
    ]
    return SimpleNamespace(layers=layers)


class FakeComm:
    """Sums are put together once all ranks have been asked for theirs."""

    def __init__(self, total: Tensor | None) -> None:
        self.device = torch.device("cpu")
        self.world = 3
        self.given: Tensor | None = None
        self._total = total

    def exchange_background(self, x: Tensor, room: list[Tensor]) -> list[Tensor]:
        assert [each.shape for each in room] == [x.shape] * self.world
        self.given = x
        return [torch.zeros_like(x) if self._total is None else self._total]


def finish(world: int, images: list[AdapterImage], *, fused: bool) -> list[AdapterImage]:
    """As all ranks would: first what each gives to the sum, then what it makes of it."""
    cuts, whole = cut_model(DIMS, world), base_weights()
    total: Tensor | None = None
    for _ in range(2):
        comms = [FakeComm(total) for _ in cuts]
        done = [
            RankGains(shard(whole, cut, fused=fused), cut, DIMS, OPS, comm, torch.float32).finish(
                image, lambda what, nbytes, work: work()
            )
            for cut, comm, image in zip(cuts, comms, images, strict=True)
        ]
        given = [comm.given for comm in comms if comm.given is not None]
        total = torch.stack(given).sum(0) if given else None
    return done


def expected(place: tuple[int, int], module: LoraModule) -> Tensor:
    weight = base_weights()[place].double()
    weight = weight + module.scale * (module.b.double() @ module.a.double())
    assert module.magnitude is not None
    return (module.magnitude.double() / torch.linalg.norm(weight, dim=1)).float()


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_every_cut_gives_the_same_gains(
    world: int, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gains, "CHUNK_ELEMENTS", 100)  # several chunks
    modules = random_modules(DIMS, every_site(DIMS, 3), extras=True, seed=1)
    cuts = cut_model(DIMS, world)
    images = pack_adapter(revision_of(modules), cuts, DIMS, torch.float32, PAGE)
    finished = finish(world, images, fused=fused)
    having = [place for place, module in modules.items() if module.magnitude is not None]
    assert gain_places(images[0].record, DIMS.layers) == having
    for place in having:
        wanted = expected(place, modules[place])
        for image, cut in zip(finished, cuts, strict=True):
            part = weight_slice(DIMS, cut.layers[place[0]], place[1])
            row = gain_row(image.pages, image.record, *place, part.rows.size)
            torch.testing.assert_close(row, wanted[part.rows.slice], rtol=1e-7, atol=0)


def test_images_are_left_as_they_were_and_plain_ones_are_passed_on() -> None:
    modules = random_modules(DIMS, {(0, 0): 2, (1, 6): 2}, extras=True, seed=1)
    images = pack_adapter(revision_of(modules), cut_model(DIMS, 2), DIMS, torch.float32, PAGE)
    before = [image.pages.clone() for image in images]
    assert any(m.magnitude is not None for m in modules.values())
    finished = finish(2, images, fused=True)
    for image, done, pages in zip(images, finished, before, strict=True):
        assert torch.equal(image.pages, pages) and not torch.equal(done.pages, pages)
    plain = revision_of(random_modules(DIMS, {(0, 0): 2}))
    (image,) = pack_adapter(plain, cut_model(DIMS, 1), DIMS, torch.float32, PAGE)
    assert finish(1, [image], fused=True)[0] is image


def test_a_weight_that_the_delta_cancels_keeps_its_digits() -> None:
    weight = torch.tensor([[3.0, 4.0], [1.0, 0.0]])
    a, b = torch.tensor([[3.0, 4.0]]), torch.tensor([[-1.0 + 2.0**-20], [0.0]])
    squares = squared_norms(DenseWeight(weight=weight), 0, a, b, 1.0, OPS)
    torch.testing.assert_close(squares.sqrt(), torch.tensor([5 * 2.0**-20, 1.0]).double())


def test_a_row_without_norm_gets_no_gain() -> None:
    squares = torch.tensor([0.0, 4.0], dtype=torch.float64)
    assert gains_of(torch.tensor([3.0, 3.0]), squares).tolist() == [0.0, 1.5]


@pytest.mark.parametrize(("start", "stop"), [(0, 7), (2, 5), (3, 3), (0, 0), (6, 7)])
def test_rows_of_weights_are_exact(start: int, stop: int) -> None:
    generator = torch.Generator().manual_seed(0)
    nf4 = NF4Weight(
        codes=torch.randint(0, 256, (7, 51), dtype=torch.uint8, generator=generator),
        absmax=torch.rand(7, 3, generator=generator),
        phase=torch.tensor([0, 5, 63, 1, 2, 3, 4], dtype=torch.int32),
        columns=101,
    )
    weights: list[tuple[Weight, Tensor]] = [(nf4, dequantize(nf4, torch.float32))]
    dense = torch.randn(7, 9, generator=generator).bfloat16()
    weights.append((DenseWeight(weight=dense), dense.float()))
    for weight, whole in weights:
        rows = float_rows(weight, start, stop, OPS.dequantize)
        assert rows.dtype == torch.float32 and torch.equal(rows, whole[start:stop])
