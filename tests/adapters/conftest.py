from pathlib import Path

import pytest

from sharding import ModelDims
from tests.helpers.tiny_models import make_checkpoint
from tp_engine.models.spec import ModelSpec


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 2 layers, hidden 64, MLP 128, 4 heads in 2 KV groups."""
    return make_checkpoint(tmp_path_factory.mktemp("base"), "llama")


@pytest.fixture(scope="session")
def spec(model_dir: Path) -> ModelSpec:
    return ModelSpec.from_directory(model_dir)


@pytest.fixture(scope="session")
def dims(spec: ModelSpec) -> ModelDims:
    return spec.dims()
