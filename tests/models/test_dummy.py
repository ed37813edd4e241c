"""Dummy weights have the shapes and kinds of loaded ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kernels.nf4 import DenseWeight, NF4Weight
from sharding import cut_model
from tests.helpers.tiny_models import make_checkpoint
from tp_engine.models import ModelSpec
from tp_engine.weights import load_weights


def describe(weights: object) -> object:
    """Shapes and kinds, nested as the weights are."""
    if isinstance(weights, torch.Tensor):
        return tuple(weights.shape), weights.dtype
    if isinstance(weights, NF4Weight):
        return "nf4", weights.shape, weights.blocksize, weights.codes.shape
    if isinstance(weights, DenseWeight):
        return "dense", weights.shape, weights.weight.dtype
    if isinstance(weights, (list, tuple)):
        return [describe(part) for part in weights]
    if weights is None:
        return None
    return {name: describe(getattr(weights, name)) for name in weights.__slots__}


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("quantize", [None, "nf4"])
def test_dummy_weights_look_like_loaded_ones_on_every_rank(tmp_path: Path, kind, quantize) -> None:
    directory = make_checkpoint(tmp_path / "model", kind)
    spec = ModelSpec.from_directory(directory)
    options = {"dtype": torch.float32, "device": torch.device("cpu"), "quantize": quantize}
    for cut in cut_model(spec.dims(), 3):
        dummy = load_weights(spec, directory, cut, load_format="dummy", **options)
        loaded = load_weights(spec, directory, cut, **options)
        assert describe(dummy) == describe(loaded)
