"""Shared by all kernel tests: one tolerance table, one seed, one thread."""

from collections.abc import Iterator

import pytest
import torch

from kernels.dispatch import Ops, ops_for
from tests.kernels.truth import REFERENCE

IMPLEMENTATIONS = ("fast", "deterministic")


@pytest.fixture(autouse=True)
def _one_seed_one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(20)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=IMPLEMENTATIONS)
def ops(request: pytest.FixtureRequest) -> Ops:
    """The ops under test, one implementation after the other."""
    return ops_for(torch.device("cpu"), deterministic=request.param == "deterministic")


@pytest.fixture
def fast() -> Ops:
    return ops_for(torch.device("cpu"))


@pytest.fixture
def deterministic() -> Ops:
    return ops_for(torch.device("cpu"), deterministic=True)


@pytest.fixture
def reference() -> Ops:
    return REFERENCE
