"""Tokenizers to detokenise with."""

import pytest

from launch.demo.cache import cache_root
from tests.text.tiny_tokenizers import byte_fallback, byte_level
from tp_engine.text import Tokenizer


@pytest.fixture(scope="session")
def byte_level_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(byte_level(tmp_path_factory.mktemp("byte-level")))


@pytest.fixture(scope="session")
def fallback_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(byte_fallback(tmp_path_factory.mktemp("byte-fallback")))


@pytest.fixture(scope="session")
def demo_tokenizer() -> Tokenizer:
    """The demo model's own tokenizer; skips where the demo was never set up."""
    directory = cache_root() / "smollm2-135m-instruct"
    if not (directory / "tokenizer.json").is_file():
        pytest.skip("the demo model is not in the cache")
    return Tokenizer.load(directory)


@pytest.fixture(params=["byte_level_tokenizer", "fallback_tokenizer", "demo_tokenizer"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Tokenizer)
    return found
