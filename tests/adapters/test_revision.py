"""A digest covers all that is computed, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import torch

from sharding import TOP, ModelDims
from tests.adapters.writing import random_modules
from tp_engine.adapters import LoraModule, digest_of

PLACE = (0, 4)


def digest(module: LoraModule) -> str:
    return digest_of({PLACE: module})


def test_every_tensor_and_its_role_count(dims: ModelDims) -> None:
    plain = random_modules(dims, {PLACE: 2})[PLACE]
    row = torch.rand(plain.b.shape[0])
    variants = [
        plain,
        replace(plain, magnitude=row),
        replace(plain, bias=row),
        replace(plain, magnitude=row, bias=row),
        replace(plain, magnitude=row + 1),
        replace(plain, magnitude=row.bfloat16()),
    ]
    assert len({digest(module) for module in variants}) == len(variants)
    assert digest(replace(plain, magnitude=row.clone())) == digest(variants[1])


def test_a_plain_pair_keeps_the_digest_that_stores_know_it_by() -> None:
    module = LoraModule(a=torch.ones(1, 2), b=torch.ones(2, 1), scale=0.5)
    expected = "713837a8054f7a6a5505b378fb7d69e414fbdd101946fbd848c4abae90600f39"
    assert digest_of({(1, 2): module}) == expected


def test_the_same_pair_elsewhere_is_another_adapter() -> None:
    module = LoraModule(a=torch.ones(1, 2), b=torch.ones(2, 1), scale=0.5)
    places = [(0, 0), (0, 1), (1, 0), (TOP, 0), (TOP, 1)]
    assert len({digest_of({place: module}) for place in places}) == len(places)
