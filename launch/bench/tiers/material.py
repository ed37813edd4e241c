"""Adapter directories with random content, in a store, for a base that is shapes alone."""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from pathlib import Path

import torch
from safetensors.torch import save_file

from sharding import SITES, ModelDims, RankCut, cut_model, weight_slice
from tp_engine.adapters.targets import module_name


def write_adapter(
    directory: Path, dims: ModelDims, *, rank: int, seed: int, sites: Collection[str], layers: int
) -> None:
    """An adapter as PEFT saves it, bfloat16.

    Args:
        directory: to make.
        dims: of the base.
        rank: LoRA rank of all modules.
        seed: of its values.
        sites: names of the modules, in each of the first ``layers`` layers.
        layers: how many.
    """
    directory.mkdir(parents=True)
    random = torch.Generator().manual_seed(seed)
    (cut,) = cut_model(dims, 1)
    tensors = {}
    for layer in range(layers):
        for site in sites:
            name = f"base_model.model.{module_name(layer, SITES.index(site))}"
            for side, shape in zip("AB", _shapes(dims, cut, layer, site, rank), strict=True):
                value = torch.empty(shape, dtype=torch.bfloat16)
                tensors[f"{name}.lora_{side}.weight"] = value.uniform_(
                    -0.02, 0.02, generator=random
                )
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": sorted(sites),
        "layers_to_transform": list(range(layers)),
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "adapter_model.safetensors")


def _shapes(
    dims: ModelDims, cut: RankCut, layer: int, site: str, rank: int
) -> tuple[tuple[int, int], tuple[int, int]]:
    part = weight_slice(dims, cut.layers[layer], site)
    return (rank, part.cols.size), (part.rows.size, rank)


def leave_page_cache(directory: Path) -> int:
    """Have the system forget what it knows of a directory's files; their bytes."""
    total = 0
    for path in directory.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            total += os.fstat(file.fileno()).st_size
    return total
