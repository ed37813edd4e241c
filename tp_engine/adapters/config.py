"""Read ``adapter_config.json``: every field is applied, known to be harmless, or refused by name.

Format: the JSON object that PEFT's ``LoraConfig.save_pretrained`` writes (fields as of PEFT 0.21).
A field that is null, false or empty is off and ignored, even an unknown one; a missing
``peft_type`` is taken for LORA, a missing ``base_model_name_or_path`` for unknown. ``r`` and
``lora_alpha`` must be there: a scale is never guessed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from sharding import SITES
from tp_engine.adapters.ends.settings import EndSettings, parse_ends
from tp_engine.adapters.errors import AdapterError, shown
from tp_engine.adapters.fields import (
    alpha_of,
    field_error,
    flag_of,
    layers_of,
    modules_of,
    names_of,
    pattern_of,
    rank_of,
)
from tp_engine.adapters.targets import TargetRule, first_match

CONFIG_NAME: Final = "adapter_config.json"
MAX_CONFIG_BYTES: Final = 4 << 20
"""Longest config accepted."""

HARMLESS: Final = frozenset(
    {
        # where it came from and how it was trained
        "auto_mapping",
        "base_model_name_or_path",
        "inference_mode",
        "lora_dropout",
        "peft_version",
        "revision",
        "runtime_config",
        "task_type",
        # only read where another field, refused here, switches them on
        "corda_config",
        "eva_config",
        "loftq_config",
        "lora_ga_config",
        "megatron_core",
        "qalora_group_size",
    }
)
"""Fields that do not change what a LoRA computes."""

APPLIED: Final = frozenset(
    {
        "alpha_pattern",
        "bias",
        "ensure_weight_tying",
        "exclude_modules",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "lora_alpha",
        "lora_bias",
        "modules_to_save",
        "peft_type",
        "r",
        "rank_pattern",
        "target_modules",
        "trainable_token_indices",
        "use_dora",
        "use_rslora",
    }
)
"""Fields that are read."""

REFUSED: Final = {
    "alora_invocation_tokens": "activated LoRA is not supported; null is allowed",
    "arrow_config": "Arrow routing is not supported; null is allowed",
    "fan_in_fan_out": "the base stores its weights as [out, in]; false is allowed",
    "kasa_config": "KaSA changes the base weights; null is allowed",
    "layer_replication": "replicated layers are not supported; null is allowed",
    "megatron_config": "Megatron layers are not supported; null is allowed",
    "monteclora_config": "MonteCLoRA is not supported; null is allowed",
    "target_parameters": "LoRA on parameters (experts) is not supported; null is allowed",
    "use_bdlora": "block-diagonal LoRA is not supported; null is allowed",
    "use_qalora": "QALoRA is not supported; false is allowed",
    "velora_config": "VeLoRA is not supported; null is allowed",
}
"""Fields that change what is computed in a way that is not supported, and what is allowed."""

_UNMODIFIED_BASE: Final = ("gaussian", "eva", "orthogonal", "mica")
"""Initialisations by name after which the base weights are what they were."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraSettings:
    """What a config says about the tensors beside it."""

    rank: int
    alpha: float
    use_rslora: bool
    rank_pattern: Mapping[str, int]
    """Regular expression -> rank; the first that matches wins."""
    alpha_pattern: Mapping[str, float]
    use_dora: bool
    """Whether modules have gains."""
    lora_bias: bool
    """Whether B has a bias."""
    targets: TargetRule
    ends: EndSettings
    """Beside ``targets``, what is said of the embedding and the LM head."""
    base_name: str | None
    """The base it was trained on, by the config's word."""

    def rank_of(self, module: str) -> int:
        """LoRA rank of a module."""
        key = first_match(self.rank_pattern, module)
        return self.rank if key is None else self.rank_pattern[key]

    def scale_of(self, module: str) -> float:
        """alpha / r of a module, or alpha / sqrt(r) with rsLoRA, in float64."""
        key = first_match(self.alpha_pattern, module)
        alpha = self.alpha if key is None else self.alpha_pattern[key]
        rank = self.rank_of(module)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank


def read_config(path: Path) -> LoraSettings:
    """Read and check a config file.

    Raises:
        AdapterError: the file is no JSON object, or a field's value is not supported.
        OSError: it can't be read.
    """
    return parse_config(_read_json(path))


def parse_config(fields: Mapping[str, Any]) -> LoraSettings:
    """As `read_config`, from the parsed object."""
    on = {name: value for name, value in fields.items() if not _off(name, value)}
    _refuse_unsupported(on)
    targets = modules_of(on, "target_modules", None)
    rule = TargetRule(
        targets=SITES if isinstance(targets, str) and targets.lower() == "all-linear" else targets,
        exclude=modules_of(on, "exclude_modules", ()) or (),
        layers=layers_of(on, "layers_to_transform"),
        layers_patterns=names_of(on, "layers_pattern"),
    )
    _check_layers(on, rule)
    base = on.get("base_model_name_or_path")
    if base is not None and not isinstance(base, str):
        raise field_error("base_model_name_or_path", base, "text or null")
    return LoraSettings(
        rank=rank_of("r", _required(on, "r")),
        alpha=alpha_of("lora_alpha", _required(on, "lora_alpha")),
        use_rslora=flag_of(on, "use_rslora"),
        rank_pattern=pattern_of(on, "rank_pattern", rank_of),
        alpha_pattern=pattern_of(on, "alpha_pattern", alpha_of),
        use_dora=flag_of(on, "use_dora"),
        lora_bias=flag_of(on, "lora_bias"),
        targets=rule,
        ends=parse_ends(on),
        base_name=base,
    )


def _off(name: str, value: object) -> bool:
    """Whether a field's value switches it off. PEFT reads an empty list of aLoRA tokens as on."""
    if value is None or value is False:
        return True
    return value in ("", [], {}) and name not in (*APPLIED, "alora_invocation_tokens")


def _refuse_unsupported(on: Mapping[str, Any]) -> None:
    kind = on.get("peft_type", "LORA")
    if kind != "LORA":
        raise field_error("peft_type", kind, "'LORA'", "config_unsupported")
    for name, value in on.items():
        if name in REFUSED:
            raise field_error(name, value, REFUSED[name], "config_unsupported")
        if name not in APPLIED and name not in HARMLESS:
            raise field_error(name, value, "the field is unknown here", "config_unsupported")
    if on.get("bias", "none") != "none":
        raise field_error("bias", on["bias"], "'none'", "config_unsupported")
    start = on.get("init_lora_weights", True)
    if start is not True and (not isinstance(start, str) or start.lower() not in _UNMODIFIED_BASE):
        allowed = f"true, false, {', '.join(map(repr, _UNMODIFIED_BASE))}; other initialisations "
        allowed += "change the base weights (PEFT can convert such an adapter when it saves it)"
        raise field_error("init_lora_weights", start, allowed, "config_unsupported")
    _check_variants(on, start)


def _check_variants(on: Mapping[str, Any], start: object) -> None:
    """PEFT's own conditions between the fields that add to a plain pair."""
    if on.get("use_dora") and on.get("lora_bias"):
        raise field_error("lora_bias", True, "false where use_dora is true", "config_unsupported")
    if on.get("use_dora") and start == "mica":
        reason = "not 'mica' where use_dora is true"
        raise field_error("init_lora_weights", start, reason, "config_unsupported")
    if on.get("lora_bias") and not isinstance(start, bool):
        reason = "true or false where lora_bias is true"
        raise field_error("init_lora_weights", start, reason, "config_unsupported")


def _check_layers(on: Mapping[str, Any], rule: TargetRule) -> None:
    """PEFT's own conditions between the fields that choose layers."""
    if rule.layers and isinstance(on.get("target_modules"), str):
        value = on["layers_to_transform"]
        raise field_error("layers_to_transform", value, "null where target_modules is a string")
    if rule.layers_patterns and not rule.layers:
        value = on["layers_pattern"]
        raise field_error("layers_pattern", value, "null where layers_to_transform is null")


def _required(on: Mapping[str, Any], name: str) -> Any:
    if name not in on:
        raise AdapterError("config_invalid", f"{CONFIG_NAME}: {name} is missing")
    return on[name]


def _read_json(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        data = file.read(MAX_CONFIG_BYTES + 1)
    if len(data) > MAX_CONFIG_BYTES:
        raise AdapterError("config_invalid", f"{path}: longer than {MAX_CONFIG_BYTES} bytes")
    try:
        parsed = json.loads(
            data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant
        )
    except (ValueError, RecursionError) as error:
        raise AdapterError("config_invalid", f"{path}: not UTF-8 JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise AdapterError("config_invalid", f"{path}: {shown(parsed)} is not a JSON object")
    return parsed


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name appears twice in one object")
    return found


def _no_constant(word: str) -> float:
    raise ValueError(f"{word} is not a JSON number")
