"""NF4 under tensor parallelism: the same bits as bitsandbytes, whichever way they came."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sharding import SITES, cut_model, weight_slice
from tests.distributed.material import Material
from tests.distributed.torchrun import Run
from tests.helpers.tiny_models import load_oracle
from tp_engine.models import ModelSpec
from tp_engine.weights.loader import module_name


def expected_checksums(model: str, world: int, rank: int) -> dict[str, str]:
    """Of bitsandbytes' de-quantised weights, cut for a rank."""
    spec = ModelSpec.from_directory(Path(model))
    dims = spec.dims()
    cut = cut_model(dims, world)[rank]
    modules = dict(load_oracle(Path(model)).named_modules())
    sums = {}
    for index, layer in enumerate(cut.layers):
        for site in SITES:
            part = weight_slice(dims, layer, site)
            whole: torch.Tensor = modules[module_name(index, site)].weight
            assert whole.dtype == torch.float32
            values = whole.detach()[part.rows.slice, part.cols.slice].contiguous()
            sums[f"{index}.{site}"] = hashlib.sha256(values.numpy().tobytes()).hexdigest()
    return sums


@pytest.mark.parametrize(
    ("name", "world"),
    [
        *(("smol-weights", world) for world in (1, 2, 3)),
        *((name, world) for name in ("quantised-stored", "quantised-at-load") for world in (2, 3)),
    ],
)
def test_dequantised_weights_are_those_of_bitsandbytes(
    material: Material, run: Callable[[int], Run], name: str, world: int
) -> None:
    result = run(world).result(name)
    model = material.cases["quantised-stored" if "at-load" in name else name].model
    for rank, report in enumerate(result.ranks):
        expected = expected_checksums(model, world, rank)
        assert len(expected) == len(SITES) * ModelSpec.from_directory(Path(model)).num_layers
        wrong = [key for key in expected if report.checksums[key] != expected[key]]
        assert wrong == [], f"rank {rank}"


@pytest.mark.parametrize("world", [2, 3])
def test_quantising_at_load_serves_what_the_stored_checkpoint_serves(
    run: Callable[[int], Run], world: int
) -> None:
    stored, at_load = (run(world).result(f"quantised-{how}") for how in ("stored", "at-load"))
    assert stored.rounds == at_load.rounds  # tokens and, bit for bit, log-probabilities
    assert all(answer.logprobs for answer in stored.rounds[0])
