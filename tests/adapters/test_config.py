"""Every field of a config is applied, harmless, or refused by name and value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.adapters.writing import plain_config
from tp_engine.adapters import AdapterError
from tp_engine.adapters.config import MAX_CONFIG_BYTES, parse_config, read_config
from tp_engine.adapters.fields import MAX_RANK

REFUSED: list[tuple[str, Any]] = [
    ("bias", "all"),
    ("bias", "lora_only"),
    ("trainable_token_indices", {"wte": [0]}),
    ("target_parameters", ["mlp.experts.gate_up_proj"]),
    ("layer_replication", [[0, 2]]),
    ("alora_invocation_tokens", [5]),
    ("alora_invocation_tokens", []),
    ("megatron_config", {"a": 1}),
    ("arrow_config", {"top_k": 3}),
    ("kasa_config", {"beta": 1}),
    ("velora_config", {"num_groups": 8}),
    ("monteclora_config", {"num_samples": 8}),
    ("use_bdlora", {"nblocks": 2}),
    ("use_qalora", True),
    ("fan_in_fan_out", True),
    ("init_lora_weights", "pissa"),
    ("init_lora_weights", "pissa_niter_16"),
    ("init_lora_weights", "olora"),
    ("init_lora_weights", "loftq"),
    ("init_lora_weights", "corda"),
    ("init_lora_weights", "lora_ga"),
    ("init_lora_weights", "not_invented_yet"),
    ("init_lora_weights", 3),
    ("peft_type", "ADALORA"),
    ("peft_type", "IA3"),
    ("peft_type", 7),
    ("peft_type", ["LORA"]),
    ("field_of_a_later_version", 1),
    ("field_of_a_later_version", "on"),
]

COMBINED: list[tuple[dict[str, Any], str]] = [
    ({"use_dora": True, "lora_bias": True}, "lora_bias"),
    ({"use_dora": True, "init_lora_weights": "mica"}, "init_lora_weights"),
    ({"lora_bias": True, "init_lora_weights": "gaussian"}, "init_lora_weights"),
]
"""Fields that PEFT refuses together."""

INVALID: list[tuple[str, Any]] = [
    ("use_dora", "yes"),
    ("lora_bias", 1),
    ("r", 0),
    ("r", -4),
    ("r", MAX_RANK + 1),
    ("r", 4.0),
    ("r", "4"),
    ("r", True),
    ("lora_alpha", "8"),
    ("lora_alpha", True),
    ("lora_alpha", 1e999),
    ("lora_alpha", 10**400),
    ("use_rslora", 1),
    ("use_rslora", "yes"),
    ("target_modules", 5),
    ("target_modules", [1]),
    ("target_modules", {"q_proj": 1}),
    ("target_modules", "(q_proj"),
    ("target_modules", "x" * 5000),
    ("exclude_modules", "["),
    ("layers_to_transform", "0"),
    ("layers_to_transform", [-1]),
    ("layers_to_transform", [True]),
    ("layers_pattern", "layers"),
    ("rank_pattern", [1]),
    ("rank_pattern", {"q_proj": 0}),
    ("rank_pattern", {"q_proj": "8"}),
    ("rank_pattern", {"*": 8}),
    ("alpha_pattern", {"q_proj": None}),
    ("alpha_pattern", {"(?P<x": 8}),
    ("base_model_name_or_path", 12),
    ("modules_to_save", "lm_head"),
    ("modules_to_save", [""]),
    ("modules_to_save", [1]),
    ("modules_to_save", ["(lm_head"]),
    ("trainable_token_indices", 5),
    ("trainable_token_indices", [True]),
    ("trainable_token_indices", [-1]),
    ("trainable_token_indices", [3, 3]),
    ("trainable_token_indices", {"lm_head": []}),
    ("trainable_token_indices", {"lm_head": ["3"]}),
    ("ensure_weight_tying", "yes"),
]


@pytest.mark.parametrize(("fields", "named"), COMBINED, ids=str)
def test_fields_that_exclude_each_other_are_refused(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(AdapterError, match=f"{named}=") as caught:
        parse_config(plain_config(**fields))
    assert caught.value.code == "config_unsupported"


@pytest.mark.parametrize(("field", "value"), REFUSED)
def test_unsupported_fields_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(AdapterError, match=field) as caught:
        parse_config(plain_config(**{field: value}))
    assert caught.value.code == "config_unsupported"
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(("field", "value"), INVALID)
def test_invalid_values_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(AdapterError, match=field) as caught:
        parse_config(plain_config(**{field: value}))
    assert caught.value.code == "config_invalid"


def test_layers_with_a_regex_target_are_refused_as_by_peft() -> None:
    with pytest.raises(AdapterError, match="layers_to_transform"):
        parse_config(plain_config(target_modules=".*q_proj", layers_to_transform=[0]))


@pytest.mark.parametrize("value", [None, False])
def test_unknown_fields_that_are_off_are_ignored(value: Any) -> None:
    fields = {field: value for field, _ in REFUSED if field != "peft_type"} | {"unheard_of": value}
    assert parse_config(plain_config(**fields)) == parse_config(plain_config())


@pytest.mark.parametrize("value", [[], {}, ""])
def test_empty_values_of_refused_fields_are_off(value: Any) -> None:
    settings = parse_config(plain_config(modules_to_save=value, trainable_token_indices=value))
    assert settings == parse_config(plain_config())


def test_harmless_fields_change_nothing() -> None:
    harmless = {
        "auto_mapping": {"unsloth_fixed": True},
        "inference_mode": True,
        "lora_dropout": 0.1,
        "megatron_core": "megatron.core",
        "peft_version": "9.9",
        "qalora_group_size": 16,
        "revision": "main",
        "task_type": "CAUSAL_LM",
        "eva_config": {"rho": 2.0},
        "bias": "none",
    }
    assert parse_config(plain_config(**harmless)) == parse_config(plain_config())


@pytest.mark.parametrize("start", [True, False, None, "gaussian", "eva", "orthogonal", "mica"])
def test_starts_that_leave_the_base_alone_are_accepted(start: Any) -> None:
    assert parse_config(plain_config(init_lora_weights=start)).rank == 4


@pytest.mark.parametrize("field", ["peft_type", "base_model_name_or_path"])
def test_missing_type_or_base_name_is_accepted(field: str) -> None:
    config = plain_config(base_model_name_or_path="some/base")
    del config[field]
    assert parse_config(config).rank == 4


@pytest.mark.parametrize("field", ["r", "lora_alpha"])
def test_missing_rank_or_alpha_is_refused_by_name(field: str) -> None:
    config = plain_config()
    del config[field]
    with pytest.raises(AdapterError, match=f"{field} is missing"):
        parse_config(config)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[1, 2]",
        b"null",
        b"{",
        b"\xff\xfe{}",
        b'{"r": 4, "r": 8, "lora_alpha": 8}',
        b'{"r": 4, "lora_alpha": NaN}',
        b'{"r": 4, "lora_alpha": -Infinity}',
        b"[" * 100_000,
        b" " * (MAX_CONFIG_BYTES + 1),
        json.dumps(plain_config(r=4)).encode()[:-2],
        b'{"r": ' + b"9" * 5000 + b"}",
    ],
    ids=range(12),
)
def test_a_file_that_is_no_config_is_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_bytes(data)
    with pytest.raises(AdapterError) as caught:
        read_config(tmp_path / "adapter_config.json")
    assert caught.value.code == "config_invalid"
