"""A PEFT adapter written as files alone: building a real model for it would take seconds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from sharding import cut_model, weight_slice
from tp_engine.models import ModelSpec
from tp_engine.weights.loader import module_name


def write_adapter(path: Path, spec: ModelSpec, r: int, sites: Sequence[str]) -> None:
    """Random A and B of LoRA rank ``r`` for some sites of every layer, with a scale of 2."""
    generator = torch.Generator().manual_seed(r)
    dims = spec.dims()
    (whole,) = cut_model(dims, 1)
    tensors = {}
    for index, layer in enumerate(whole.layers):
        for site in sites:
            part = weight_slice(dims, layer, site)
            name = f"base_model.model.{module_name(index, site)}"
            a = torch.randn(r, part.cols.size, generator=generator) * part.cols.size**-0.5
            tensors[f"{name}.lora_A.weight"] = a
            tensors[f"{name}.lora_B.weight"] = (
                torch.randn(part.rows.size, r, generator=generator) * 0.1
            )
    path.mkdir()
    save_file(tensors, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": r, "lora_alpha": 2 * r, "target_modules": [*sites]}
    (path / "adapter_config.json").write_text(json.dumps(config))
