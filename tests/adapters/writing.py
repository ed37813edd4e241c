"""Adapter directories made by hand, for what PEFT would never write."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from sharding import SITES, ModelDims, cut_model, weight_slice
from tp_engine.adapters import AdapterRevision, LoraModule, digest_of
from tp_engine.adapters.targets import module_name

PREFIX = "base_model.model."


def plain_config(**fields: Any) -> dict[str, Any]:
    """A minimal config of rank 4, all sites; ``fields`` are added or replaced."""
    return {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": [*SITES]} | fields


def random_modules(
    dims: ModelDims,
    ranks: Mapping[tuple[int, int], int],
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    extras: bool = False,
) -> dict[tuple[int, int], LoraModule]:
    """Random pairs of the base's shapes; each has a scale of its own.

    With `extras` some have a magnitude, some a bias, some both.
    """
    generator = torch.Generator().manual_seed(seed)
    (whole,) = cut_model(dims, 1)
    modules = {}
    for (layer, site), rank in sorted(ranks.items()):
        part = weight_slice(dims, whole.layers[layer], site)
        a = torch.randn(rank, part.cols.size, generator=generator).to(dtype)
        b = torch.randn(part.rows.size, rank, generator=generator).to(dtype)
        kind = (3 * layer + site + seed) % 4 if extras else 0
        more = (
            torch.rand(2, part.rows.size, generator=generator).to(dtype) if kind else (None, None)
        )
        modules[layer, site] = LoraModule(
            a=a,
            b=b,
            scale=0.5 + 0.1 * layer + 0.01 * site,
            magnitude=more[0] if kind & 1 else None,
            bias=more[1] if kind & 2 else None,
        )
    return modules


def every_site(dims: ModelDims, rank: int = 4) -> dict[tuple[int, int], int]:
    """(layer, site) -> rank, for all."""
    return {(layer, site): rank for layer in range(dims.layers) for site in range(len(SITES))}


def revision_of(modules: dict[tuple[int, int], LoraModule]) -> AdapterRevision:
    """A revision that was never a file."""
    return AdapterRevision(
        digest=digest_of(modules), source="memory", modules=modules, expected=len(modules)
    )


def tensors_of(modules: Mapping[tuple[int, int], LoraModule]) -> dict[str, torch.Tensor]:
    """Tensors by the names PEFT gives them."""
    named = {}
    for place, module in modules.items():
        named[f"{PREFIX}{module_name(*place)}.lora_A.weight"] = module.a
        named[f"{PREFIX}{module_name(*place)}.lora_B.weight"] = module.b
    return named


def plain_tensors(dims: ModelDims, **options: Any) -> dict[str, torch.Tensor]:
    """Random tensors of rank 4 for all sites."""
    return tensors_of(random_modules(dims, every_site(dims), **options))


def write_adapter(
    path: Path, config: Mapping[str, Any] | None, tensors: Mapping[str, torch.Tensor] | None
) -> Path:
    """Write a directory; None leaves a file out."""
    path.mkdir(parents=True, exist_ok=True)
    if config is not None:
        (path / "adapter_config.json").write_text(json.dumps(config))
    if tensors is not None:
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(contiguous, path / "adapter_model.safetensors")
    return path


def name_of(layer: int, site: str, side: str) -> str:
    """Name of one tensor."""
    return f"{PREFIX}{module_name(layer, SITES.index(site))}.lora_{side}.weight"


def renamed(
    tensors: Mapping[str, torch.Tensor], changes: Sequence[tuple[str, str]]
) -> dict[str, torch.Tensor]:
    """The tensors with parts of their names replaced."""
    found = {}
    for name, tensor in tensors.items():
        for old, new in changes:
            name = name.replace(old, new)
        found[name] = tensor
    return found
