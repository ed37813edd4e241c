"""Read an adapter's directory into an `AdapterRevision`, or refuse it with a reason.

Order of checks: path, config, header, names, shapes and dtypes; only then are bytes of tensors
read, so that what is read is bounded by the base's own dimensions. No pickled file is ever opened.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from sharding import SITES, CheckpointError, ModelDims, StoredTensor, cut_model, weight_slice
from sharding.stored import MappedFile
from tp_engine.adapters.config import CONFIG_NAME, LoraSettings, read_config
from tp_engine.adapters.errors import AdapterError, shown
from tp_engine.adapters.keys import Side, pair_tensors
from tp_engine.adapters.paths import file_inside, first_present, resolve_adapter_path
from tp_engine.adapters.revision import AdapterRevision, LoraModule, digest_of
from tp_engine.adapters.targets import (
    VOCAB_MODULES,
    first_match,
    module_name,
    module_names,
)

if TYPE_CHECKING:
    from tp_engine.models.spec import ModelSpec

WEIGHTS_NAME: Final = "adapter_model.safetensors"
DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
"""Element types accepted."""
_PICKLED: Final = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")

Site = tuple[int, int]


def read_adapter(
    directory: str | os.PathLike[str],
    spec: ModelSpec,
    *,
    base_names: Collection[str] = (),
    root: Path | None = None,
) -> AdapterRevision:
    """Read and check an adapter against the base.

    Args:
        directory: with ``adapter_config.json`` and ``adapter_model.safetensors``.
        spec: the base.
        base_names: what the base is known as; a config that names another one earns a warning.
        root: see `tp_engine.adapters.paths.resolve_adapter_path`.

    Raises:
        AdapterError: the adapter is refused; its ``code`` and message say why.
    """
    try:
        real = resolve_adapter_path(directory, root)
        config = file_inside(real, CONFIG_NAME)
        if config is None:
            raise AdapterError("config_missing", f"{real}: no {CONFIG_NAME}")
        settings = read_config(config)
        dims = spec.dims()
        modules = _read_modules(_weights_file(real), settings, dims)
    except CheckpointError as error:
        raise AdapterError("weights_corrupt", str(error)) from None
    except OSError as error:
        raise AdapterError("unreadable", f"{os.fspath(directory)}: {error}") from None
    return AdapterRevision(
        digest=digest_of(modules),
        source=str(real),
        modules=modules,
        expected=len(modules),
        warnings=tuple(_warnings(settings, modules, dims.layers, base_names)),
    )


def _weights_file(directory: Path) -> Path:
    path = file_inside(directory, WEIGHTS_NAME)
    if path is not None:
        return path
    pickled = first_present(directory, _PICKLED)
    reason = f"{directory}: no {WEIGHTS_NAME}"
    if pickled is not None:
        reason += f"; {pickled} is pickled and could run code when read: convert it to safetensors"
    raise AdapterError("weights_missing", reason)


def _read_modules(path: Path, settings: LoraSettings, dims: ModelDims) -> dict[Site, LoraModule]:
    file = MappedFile(path)
    try:
        pairs = _checked_pairs(file, settings, dims)
        return {
            place: LoraModule(
                a=_read_finite(pair["A"]),
                b=_read_finite(pair["B"]),
                scale=settings.scale_of(module_name(*place)),
            )
            for place, pair in pairs.items()
        }
    finally:
        file.close()


def _checked_pairs(
    file: MappedFile, settings: LoraSettings, dims: ModelDims
) -> dict[Site, dict[Side, StoredTensor]]:
    """Handles of all tensors, after every check that needs no content."""
    names = pair_tensors(file, module_names(dims.layers))
    _check_targets(names, settings, dims.layers)
    shapes = _base_shapes(dims)
    pairs: dict[Site, dict[Side, StoredTensor]] = {}
    for place, pair in names.items():
        pairs[place] = {side: StoredTensor(n, file.infos[n], file) for side, n in pair.items()}
        _check_pair(pairs[place], settings.rank_of(module_name(*place)), shapes[place])
    return pairs


def _check_targets(pairs: Collection[Site], settings: LoraSettings, layers: int) -> None:
    """The tensors present must be those of the modules that the config targets."""
    if not pairs:
        raise AdapterError("nothing_applied", f"{WEIGHTS_NAME} has no tensor: 0 modules to apply")
    rule = settings.targets
    if rule.targets is None:
        return
    for module, place in module_names(layers).items():
        if rule.covers(module) and place not in pairs:
            reason = f"{CONFIG_NAME} targets {module}, but {WEIGHTS_NAME} has no tensors for it"
            raise AdapterError("tensor_missing", reason)
        if place in pairs and not rule.covers(module):
            reason = f"tensors of {module} are not of a module that {CONFIG_NAME} targets"
            raise AdapterError("tensor_unknown", reason)
    for module in VOCAB_MODULES:
        if rule.covers(module):
            reason = f"{CONFIG_NAME}: target_modules covers {module}, which is not supported"
            raise AdapterError("config_unsupported", reason)


def _base_shapes(dims: ModelDims) -> dict[Site, tuple[int, int]]:
    """[out, in] of every site of the base."""
    (whole,) = cut_model(dims, 1)
    shapes = {}
    for layer, cut in enumerate(whole.layers):
        for site in range(len(SITES)):
            part = weight_slice(dims, cut, site)
            shapes[layer, site] = (part.rows.size, part.cols.size)
    return shapes


def _check_pair(pair: Mapping[Side, StoredTensor], rank: int, base: tuple[int, int]) -> None:
    """Shapes against the config and the base, and dtypes."""
    rows, cols = base
    wanted: dict[Side, tuple[int, int]] = {"A": (rank, cols), "B": (rows, rank)}
    for side, tensor in pair.items():
        label = f"tensor {shown(tensor.name)} has shape {list(tensor.shape)}"
        if 0 in tensor.shape:
            reason = "it was saved without its content (as DeepSpeed ZeRO-3 does with its shards)"
            raise AdapterError("shape_mismatch", f"{label}: {reason}")
        if tensor.shape != wanted[side]:
            reason = f"rank {rank} in {CONFIG_NAME} and a base of [{rows}, {cols}] (out, in) need "
            raise AdapterError("shape_mismatch", f"{label}; {reason}{list(wanted[side])}")
        if tensor.dtype not in DTYPES:
            allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            reason = f"tensor {shown(tensor.name)} is {tensor.dtype}; allowed are {allowed}"
            raise AdapterError("dtype_unsupported", reason)


def _read_finite(stored: StoredTensor) -> torch.Tensor:
    tensor = stored.read()
    bad = tensor.numel() - int(torch.isfinite(tensor).sum())
    if bad:
        reason = f"tensor {shown(stored.name)} has {bad} values that are NaN or infinite"
        raise AdapterError("not_finite", reason)
    return tensor


def _warnings(
    settings: LoraSettings, modules: Collection[Site], layers: int, base_names: Collection[str]
) -> list[str]:
    """What is odd but changes nothing that is computed."""
    found = []
    base, rule = settings.base_name, settings.targets
    if base and base_names and base.rstrip("/") not in {name.rstrip("/") for name in base_names}:
        known = ", ".join(map(shown, base_names))
        found.append(f"trained on base {shown(base)}; the served base is known as {known}")
    for target in rule.idle_targets(module_names(layers)):
        found.append(f"target_modules has {shown(target)}, which no module of the base matches")
    for layer in (layer for layer in rule.layers if layer >= layers):
        found.append(f"layers_to_transform has {layer}; the base has {layers} layers")
    names = [module_name(layer, site) for layer, site in modules]
    for field in ("rank_pattern", "alpha_pattern"):
        for pattern in getattr(settings, field):
            if not any(first_match((pattern,), name) for name in names):
                found.append(f"{field} has {shown(pattern)}, which matches no module")
    return found
