"""Shared by all kernel tests: one tolerance table, one seed, one thread; and what runs beside."""

from collections.abc import Generator, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from kernels.dispatch import Ops, ops_for
from tests.kernels.beside import Beside
from tests.kernels.truth import REFERENCE

IMPLEMENTATIONS = ("fast", "deterministic")
BESIDE = pytest.StashKey[Beside]()


def is_beside(item: pytest.Item) -> bool:
    return "beside" in getattr(item, "fixturenames", ())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What runs beside the other tests is looked at behind them."""
    items.sort(key=is_beside)


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, object, object]:
    """Start with the session what the tests of it will look at."""
    wanted = [item for item in session.items if is_beside(item)]
    if not wanted or session.config.option.collectonly:
        return (yield)
    with TemporaryDirectory() as directory:
        names = [item.callspec.params["name"] for item in wanted]  # type: ignore[attr-defined]
        session.stash[BESIDE] = Beside(Path(directory), names)
        try:
            return (yield)
        finally:
            session.stash[BESIDE].close()


@pytest.fixture
def beside(request: pytest.FixtureRequest) -> Beside:
    """The processes of this session that run test files."""
    return request.session.stash[BESIDE]


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
