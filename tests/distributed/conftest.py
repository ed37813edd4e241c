"""One torchrun a world size for the whole session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from tests.distributed.material import Material
from tests.distributed.oracle import Oracle
from tests.distributed.torchrun import Run, run_cases
from tests.distributed.workload import Case

RUN_TIMEOUT = 1200.0
"""Seconds; a run takes one to two minutes on two idle cores."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first test of a world size waits for its whole run."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.timeout(RUN_TIMEOUT + 120))


@pytest.fixture(scope="session")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("distributed")


@pytest.fixture(scope="session")
def material(scratch: Path) -> Material:
    made = Material(scratch)
    (scratch / "workload.json").write_bytes(msgspec.json.encode(list(made.cases.values())))
    return made


@pytest.fixture(scope="session")
def run(material: Material, scratch: Path) -> Callable[[int], Run]:
    """The run of a world size, started when it is first asked for."""
    runs: dict[int, Run] = {}

    def at(world: int) -> Run:
        if world not in runs:
            runs[world] = run_cases(world, scratch / "workload.json", scratch, timeout=RUN_TIMEOUT)
        return runs[world]

    return at


@pytest.fixture(scope="session")
def oracle() -> Callable[[Case], Oracle]:
    """The oracle of a case's model and adapters; SmolLM2 in float32, whose rounding is a hundredth
    of a near-tie, the tiny models in float64."""
    oracles: dict[str, Oracle] = {}

    def of(case: Case) -> Oracle:
        if case.name not in oracles:
            dtype = torch.float32 if case.name.startswith("smol") else torch.float64
            apart = case.name.startswith("ends")
            oracles[case.name] = Oracle(case.model, case.adapters, dtype, apart=apart)
        return oracles[case.name]

    return of
