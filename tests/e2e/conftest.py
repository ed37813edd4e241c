"""A tiny model with a tokenizer and eight adapters, for services that start in seconds."""

from pathlib import Path

import pytest

from tests.helpers.tiny_models import make_checkpoint, make_peft_adapter

ADAPTERS = tuple(f"style-{number}" for number in range(8))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the model; its context is 4096 tokens."""
    path = tmp_path_factory.mktemp("model")
    return make_checkpoint(path, "llama", tokenizer=True, max_position_embeddings=4096)


@pytest.fixture(scope="session")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of adapters named as in `ADAPTERS`, of mixed ranks."""
    path = tmp_path_factory.mktemp("adapters")
    for number, name in enumerate(ADAPTERS):
        make_peft_adapter(path / name, model, r=2 + 2 * (number % 3), seed=number + 1)
    return path
