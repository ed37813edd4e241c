"""The table of ops, and the marker of the package."""

import dataclasses

import pytest
import torch

import kernels
from kernels.dispatch import Ops, ops_for


def test_every_op_is_there_for_every_device() -> None:
    optional = {"capturable", "lora_beside", "lora_renew", "lora_silu_mul", "most_columns"}
    for ops in (
        ops_for(torch.device("cpu")),
        ops_for(torch.device("cpu"), deterministic=True),
        ops_for(torch.device("cuda")),
    ):
        names = {field.name for field in dataclasses.fields(Ops)} - optional
        assert all(callable(getattr(ops, name)) for name in names)


def test_the_same_table_comes_back() -> None:
    assert ops_for(torch.device("cpu")) is ops_for(torch.device("cpu"))
    assert ops_for(torch.device("cpu")) is not ops_for(torch.device("cpu"), deterministic=True)


def test_other_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="device must be of type 'cpu' or 'cuda', got 'meta'"):
        ops_for(torch.device("meta"))


def test_determinism_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="deterministic=True is not available"):
        ops_for(torch.device("cuda"), deterministic=True)


def test_the_package_carries_its_marker() -> None:
    assert kernels.TP_ENGINE is True


def test_exported_names() -> None:
    assert kernels.__all__ == [
        "NF4_CODE",
        "TP_ENGINE",
        "AttentionBatch",
        "DenseWeight",
        "LoraBatch",
        "LoraSegments",
        "LoraTarget",
        "NF4Weight",
        "Ops",
        "Weight",
        "ops_for",
    ]
    assert all(hasattr(kernels, name) for name in kernels.__all__)
