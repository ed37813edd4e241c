"""Greedy tokens of the base and all adapters in one batch equal transformers + PEFT."""

from collections.abc import Callable
from pathlib import Path

import pytest

from sharding import cut_model
from tests.distributed.agreement import assert_agreement
from tests.distributed.material import GREEDY_TOKENS, LONG, WORLDS, Material
from tests.distributed.oracle import Oracle
from tests.distributed.torchrun import Run
from tests.distributed.workload import Case
from tests.helpers.tiny_models import KINDS
from tp_engine.models import ModelSpec

MIXED = ["smol-greedy", *(f"greedy-{k}-{w}" for k in KINDS for w in ("plain", "nf4"))]


def check(material: Material, run: Run, oracle: Callable[[Case], Oracle], name: str) -> None:
    """Every answer of every round of a case agrees with the oracle."""
    case, result = material.cases[name], run.result(name)
    compared = []
    for asks, answers in zip(case.rounds, result.rounds, strict=True):
        assert [len(a.tokens) for a in answers] == [ask.params.max_tokens for ask in asks]
        names = [ask.model or "base" for ask in asks]
        compared += zip(names, oracle(case).compare(asks, answers), strict=True)
    assert_agreement(compared)


@pytest.mark.parametrize("name", MIXED)
@pytest.mark.parametrize("world", WORLDS)
def test_a_mixed_batch_equals_transformers_and_peft(
    material: Material,
    run: Callable[[int], Run],
    oracle: Callable[[Case], Oracle],
    world: int,
    name: str,
) -> None:
    (asks,) = material.cases[name].rounds
    assert {ask.model for ask in asks} == {None, *material.cases[name].adapters}
    assert all(ask.params.max_tokens == GREEDY_TOKENS for ask in asks)
    check(material, run(world), oracle, name)


@pytest.mark.parametrize("name", MIXED)
def test_adapters_change_the_output(
    material: Material, run: Callable[[int], Run], name: str
) -> None:
    """Else the comparison would not show that they were applied."""
    (answers,) = run(2).result(name).rounds
    outputs = {tuple(answer.tokens) for answer in answers}
    assert len(outputs) == len(answers)


@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize("world", [2, 3])
def test_prompts_beyond_the_window_and_the_original_context(
    material: Material,
    run: Callable[[int], Run],
    oracle: Callable[[Case], Oracle],
    world: int,
    name: str,
) -> None:
    case = material.cases[name]
    spec = ModelSpec.from_directory(Path(case.model))
    longest = max(len(ask.prompt) for ask in case.rounds[0])
    assert any(window and window < longest for window in spec.windows) == ("window" in name)
    if name == "rope-default":
        assert longest + GREEDY_TOKENS == spec.max_position_embeddings
    check(material, run(world), oracle, name)


def test_ranks_without_a_unit_of_some_module_join_in(
    material: Material, run: Callable[[int], Run], oracle: Callable[[Case], Oracle]
) -> None:
    case = material.cases["no-units"]
    cuts = cut_model(ModelSpec.from_directory(Path(case.model)).dims(), 4)
    layers = [cut.layers[0] for cut in cuts]
    assert any(layer.q_heads.size == 0 for layer in layers)
    assert any(layer.mlp.size == 0 for layer in layers)
    assert any(cut.vocab.size == 0 for cut in cuts)
    check(material, run(4), oracle, "no-units")
