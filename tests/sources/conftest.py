"""Adapters' files as bytes, and places to fetch them from and to."""

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sources.web import CONFIG, WEIGHTS, Web, web_server
from tp_engine.sources import FetchArea


def adapter_bytes(seed: int = 0, size: int = 300_000) -> dict[str, bytes]:
    """A config, and weights of ``size`` bytes that begin as safetensors do."""
    content = random.Random(seed).randbytes(size - 10)
    return {
        CONFIG: json.dumps({"r": 8, "seed": seed}).encode(),
        WEIGHTS: (2).to_bytes(8, "little") + b"{}" + content,
    }


@pytest.fixture
def web() -> Iterator[Web]:
    with web_server() as web:
        for name, data in adapter_bytes().items():
            web.files[f"team/x/{name}"] = data
        yield web


@pytest.fixture
def area(tmp_path: Path) -> FetchArea:
    return FetchArea(tmp_path / "store")
