"""Read an adapter's directory into an `AdapterRevision`, or refuse it with a reason.

Order of checks: path, config, header, names, shapes and dtypes; only then are bytes of tensors
read, so that what is read is bounded by the base's own dimensions. No pickled file is ever opened.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sharding import SITES, CheckpointError, ModelDims, StoredTensor, cut_model, weight_slice
from sharding.stored import MappedFile
from tp_engine.adapters.config import CONFIG_NAME, LoraSettings, read_config
from tp_engine.adapters.ends.keys import end_tensors
from tp_engine.adapters.ends.reader import BaseEnds, EndReader
from tp_engine.adapters.ends.replaced import Replaced
from tp_engine.adapters.ends.rule import end_rules
from tp_engine.adapters.errors import AdapterError, shown
from tp_engine.adapters.fields import field_error
from tp_engine.adapters.keys import Role, check_roles, pair_tensors
from tp_engine.adapters.paths import file_inside, first_present, resolve_adapter_path
from tp_engine.adapters.revision import AdapterRevision, LoraModule, digest_of
from tp_engine.adapters.targets import (
    VOCAB_MODULES,
    Place,
    first_match,
    module_name,
    module_names,
)
from tp_engine.adapters.tensors import check_tensor, read_finite
from tp_engine.interpreter import giving_way
from tp_engine.shortage import asking_for

if TYPE_CHECKING:
    from tp_engine.models.spec import ModelSpec

WEIGHTS_NAME: Final = "adapter_model.safetensors"
MAX_TENSOR_NAME: Final = 1024
"""Longest name of a tensor, in characters: names are taken apart in time that grows faster."""
_PICKLED: Final = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")

Site = tuple[int, int]


def read_adapter(
    directory: str | os.PathLike[str],
    spec: ModelSpec,
    *,
    base_names: Collection[str] = (),
    base: BaseEnds | None = None,
    root: Path | None = None,
) -> AdapterRevision:
    """Read and check an adapter against the base.

    Args:
        directory: with ``adapter_config.json`` and ``adapter_model.safetensors``.
        spec: the base.
        base_names: what the base is known as; a config that names another one earns a warning.
        base: its embedding and LM head, copies of which that a file may hold need no memory.
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
        weights = _weights_file(real)
        with asking_for(f"the tensors of {weights}", weights.stat().st_size):
            modules, replaced = _read_changes(weights, settings, spec, base)
            digest = digest_of(modules, replaced)
    except CheckpointError as error:
        raise AdapterError("weights_corrupt", str(error)) from None
    except OSError as error:
        raise AdapterError("unreadable", f"{os.fspath(directory)}: {error}") from None
    return AdapterRevision(
        digest=digest,
        source=str(real),
        modules=modules,
        expected=len(modules) + len(replaced),
        replaced=replaced,
        warnings=tuple(_warnings(settings, modules, spec.num_layers, base_names)),
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


def _read_changes(
    path: Path, settings: LoraSettings, spec: ModelSpec, base: BaseEnds | None
) -> tuple[dict[Place, LoraModule], dict[int, Replaced]]:
    """The LoRA modules, and what is replaced at the two ends."""
    dims, tied = spec.dims(), spec.tie_word_embeddings
    file = MappedFile(path, giving_way)
    try:
        if not file.infos:
            raise _nothing("has no tensor")
        if long := [name for name in file if len(name) > MAX_TENSOR_NAME]:
            reason = (
                f"its name has {len(long[0])} characters; at most {MAX_TENSOR_NAME} are allowed"
            )
            raise AdapterError("tensor_unknown", f"tensor {shown(long[0])}: {reason}")
        of_ends = end_tensors(file)
        reader = EndReader(
            {key: StoredTensor(name, file.infos[name], file) for key, name in of_ends.items()},
            end_rules(settings.ends, settings.targets, tied=tied),
            settings,
            dims,
            tied=tied,
        )
        pairs = _checked_pairs(file, set(file) - set(of_ends.values()), settings, dims)
        ends = reader.read(base)
        _check_ends(ends.pairs, settings)
        if not pairs and not ends.pairs and not ends.replaced:
            raise _nothing("has nothing but the base's own numbers")
        modules = {
            place: LoraModule(
                a=read_finite(pair["A"]),
                b=read_finite(pair["B"]),
                scale=settings.scale_of(module_name(*place)),
                magnitude=read_finite(pair["magnitude"]) if "magnitude" in pair else None,
                bias=read_finite(pair["bias"]) if "bias" in pair else None,
            )
            for place, pair in pairs.items()
        }
        return ends.pairs | modules, ends.replaced
    finally:
        file.close()


def _check_ends(places: Collection[Place], settings: LoraSettings) -> None:
    """Gains and biases of the two ends would have tensors, which are refused; so is their lack."""
    for place in places:
        for field in ("use_dora", "lora_bias"):
            if getattr(settings, field):
                allowed = f"false where there is LoRA on {module_name(*place)}"
                raise field_error(field, True, allowed, "config_unsupported")


def _nothing(reason: str) -> AdapterError:
    return AdapterError("nothing_applied", f"{WEIGHTS_NAME} {reason}: 0 modules to apply")


def _checked_pairs(
    file: MappedFile, tensors: Collection[str], settings: LoraSettings, dims: ModelDims
) -> dict[Site, dict[Role, StoredTensor]]:
    """Handles of all tensors, after every check that needs no content."""
    names = pair_tensors(tensors, module_names(dims.layers))
    _check_targets(names, settings, dims.layers)
    shapes = _base_shapes(dims)
    pairs: dict[Site, dict[Role, StoredTensor]] = {}
    for place, pair in giving_way(names.items()):
        asked = {"dora": settings.use_dora, "bias": settings.lora_bias}
        check_roles(pair, module_name(*place), **asked)
        pairs[place] = {role: StoredTensor(n, file.infos[n], file) for role, n in pair.items()}
        _check_pair(pairs[place], settings.rank_of(module_name(*place)), shapes[place])
    return pairs


def _check_targets(pairs: Collection[Site], settings: LoraSettings, layers: int) -> None:
    """The tensors present must be those of the modules that the config targets."""
    rule = settings.targets
    if rule.targets is None:
        return
    for module, place in giving_way(module_names(layers).items()):
        covered = rule.covers(module)
        if covered and place not in pairs:
            reason = f"{CONFIG_NAME} targets {module}, but {WEIGHTS_NAME} has no tensors for it"
            raise AdapterError("tensor_missing", reason)
        if place in pairs and not covered:
            reason = f"tensors of {module} are not of a module that {CONFIG_NAME} targets"
            raise AdapterError("tensor_unknown", reason)


def _base_shapes(dims: ModelDims) -> dict[Site, tuple[int, int]]:
    """[out, in] of every site of the base."""
    (whole,) = cut_model(dims, 1)
    shapes = {}
    for layer, cut in giving_way(enumerate(whole.layers)):
        for site in range(len(SITES)):
            part = weight_slice(dims, cut, site)
            shapes[layer, site] = (part.rows.size, part.cols.size)
    return shapes


def _check_pair(pair: Mapping[Role, StoredTensor], rank: int, base: tuple[int, int]) -> None:
    """Shapes against the config and the base, and dtypes."""
    rows, cols = base
    wanted: dict[Role, tuple[int, ...]] = {
        **{"A": (rank, cols), "B": (rows, rank)},
        **{"magnitude": (rows,), "bias": (rows,)},
    }
    need = f"rank {rank} in {CONFIG_NAME} and a base of [{rows}, {cols}] (out, in) need"
    for role, tensor in pair.items():
        check_tensor(tensor, wanted[role], need)


def _warnings(
    settings: LoraSettings, modules: Collection[Site], layers: int, base_names: Collection[str]
) -> list[str]:
    """What is odd but changes nothing that is computed."""
    found = []
    base, rule = settings.base_name, settings.targets
    if base and base_names and base.rstrip("/") not in {name.rstrip("/") for name in base_names}:
        known = ", ".join(map(shown, dict.fromkeys(base_names)))
        found.append(f"trained on base {shown(base)}; the served base is known as {known}")
    every = (*module_names(layers), *VOCAB_MODULES)
    for target in rule.idle_targets(every):
        found.append(f"target_modules has {shown(target)}, which no module of the base matches")
    for name in (each for each in settings.ends.saved if not any(m.endswith(each) for m in every)):
        found.append(f"modules_to_save has {shown(name)}, which no module of the base matches")
    for layer in (layer for layer in rule.layers if layer >= layers):
        found.append(f"layers_to_transform has {layer}; the base has {layers} layers")
    names = [module_name(layer, site) for layer, site in modules]
    for field in ("rank_pattern", "alpha_pattern"):
        for pattern in getattr(settings, field):
            if not any(first_match((pattern,), name) for name in names):
                found.append(f"{field} has {shown(pattern)}, which matches no module")
    return found
