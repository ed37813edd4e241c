"""Which modules an adapter's config targets, with the rules by which PEFT matches names.

Module names are those of the base model, such as ``model.layers.0.self_attn.q_proj``.
Source: PEFT's documentation of ``target_modules``, ``exclude_modules``, ``layers_to_transform``,
``layers_pattern``, ``rank_pattern`` and ``alpha_pattern``, and its behaviour.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sharding import SITES, TOP, VOCAB_SITES
from tp_engine.adapters.patterns import match_start, matches_whole

Place = tuple[int, int]
"""(layer, site) of a module; at the two ends (`sharding.TOP`, position in `VOCAB_SITES`)."""
VOCAB_MODULES = ("model.embed_tokens", "lm_head")
"""Names of `sharding.VOCAB_SITES` in the base model."""
assert [name.split(".")[-1] for name in VOCAB_MODULES] == list(VOCAB_SITES)

_BLOCKS = {site: "self_attn" if site in SITES[:4] else "mlp" for site in SITES}


def module_name(layer: int, site: int) -> str:
    """Name of a site's module in the base model."""
    if layer == TOP:
        return VOCAB_MODULES[site]
    name = SITES[site]
    return f"model.layers.{layer}.{_BLOCKS[name]}.{name}"


def module_names(layers: int) -> dict[str, Place]:
    """Name of every linear module of the layers -> (layer, site)."""
    return {
        module_name(layer, site): (layer, site)
        for layer in range(layers)
        for site in range(len(SITES))
    }


def ending(pattern: str) -> str:
    """Regular expression by which a pattern of a config matches the end of a module's name."""
    return rf"(.*\.)?({pattern})$"


def in_list(pattern: str) -> str:
    """Regular expression for a module in the list that ``pattern`` names, with its ``index``."""
    return rf"(?:^|.*?\.){pattern}\.(?P<index>\d+)\."


def first_match(patterns: Iterable[str], module: str) -> str | None:
    """The first pattern, in the order of the config, that matches the end of a module's name."""
    return next((pattern for pattern in patterns if match_start(ending(pattern), module)), None)


def _listed(names: Iterable[str], module: str) -> bool:
    return any(module == name or module.endswith(f".{name}") for name in names)


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetRule:
    """The part of a config that says which modules have tensors."""

    targets: str | tuple[str, ...] | None
    """A regular expression for the whole name, or names and suffixes; None says nothing."""
    exclude: str | tuple[str, ...] = ()
    """Likewise, for modules left out."""
    layers: tuple[int, ...] = ()
    """Layers that suffixes apply to; empty for all."""
    layers_patterns: tuple[str, ...] = ()
    """Names of the module list that ``layers`` counts in; empty for any."""

    def covers(self, module: str) -> bool:
        """Whether the config targets a module."""
        if self.targets is None or self._excludes(module):
            return False
        if isinstance(self.targets, str):
            return matches_whole(self.targets, module)
        if module in self.targets:
            return True
        return _listed(self.targets, module) and self._in_layers(module)

    def idle_targets(self, modules: Iterable[str]) -> tuple[str, ...]:
        """Entries of a list of targets that match none of the modules."""
        if self.targets is None or isinstance(self.targets, str):
            return ()
        names = list(modules)
        return tuple(t for t in self.targets if not any(_listed((t,), name) for name in names))

    def _excludes(self, module: str) -> bool:
        if isinstance(self.exclude, str):
            return matches_whole(self.exclude, module)
        return _listed(self.exclude, module)

    def _in_layers(self, module: str) -> bool:
        if not self.layers:
            return True
        rules = [in_list(p) for p in self.layers_patterns] or [r".*?\.[^.]*\.(?P<index>\d+)\."]
        match = next((found for rule in rules if (found := match_start(rule, module))), None)
        return match is not None and int(match["index"]) in self.layers
