"""Places to fetch them from and to."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sources.web import Web, adapter_bytes, web_server
from tp_engine.sources import FetchArea


@pytest.fixture
def web() -> Iterator[Web]:
    with web_server() as web:
        for name, data in adapter_bytes().items():
            web.files[f"team/x/{name}"] = data
        yield web


@pytest.fixture
def area(tmp_path: Path) -> FetchArea:
    return FetchArea(tmp_path / "store")
