"""PEFT decides which modules an adapter changes, and by how much."""

from __future__ import annotations

import dataclasses
import json
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from peft.tuners.lora import LoraLayer

from sharding import SITES
from tests.helpers.tiny_models import make_checkpoint, make_peft_adapter
from tp_engine.adapters import read_adapter
from tp_engine.adapters.config import APPLIED, HARMLESS, REFUSED
from tp_engine.adapters.targets import module_name
from tp_engine.models.spec import ModelSpec

CASES: dict[str, dict[str, Any]] = {
    "raw_alpha_is_not_the_scale": {"r": 8, "alpha": 16},
    "rslora": {"r": 16, "alpha": 16, "rslora": True},
    "fractional_alpha": {"r": 3, "alpha": 0.7},
    "patterns_for_one_layer": {
        "r": 8,
        "alpha": 16,
        "rank_pattern": {r"layers\.1\..*": 32},
        "alpha_pattern": {r"layers\.1\..*": 128},
    },
    "first_pattern_wins": {  # PEFT sorts the patterns when it saves
        "rank_pattern": {r"model\.layers\.0\.self_attn\.q_proj": 6, "q_proj": 2, "v_proj": 5},
        "alpha_pattern": {".*k_proj": 5.0, "k_proj": 7.0},
    },
    "pattern_must_match_whole_parts": {"rank_pattern": {"proj": 2, "_proj": 3, "k_proj": 5}},
    "anchored_pattern": {"rank_pattern": {"^model.layers.0.self_attn.q_proj": 6}},
    "rslora_with_patterns": {
        "rslora": True,
        "rank_pattern": {"mlp.*": 9},
        "alpha_pattern": {"v_proj": 3},
    },
    "layers_to_transform": {"layers": [1]},
    "layers_pattern": {"layers": [0], "layers_pattern": "layers"},
    "excluded_by_list": {"exclude_modules": ["q_proj", "model.layers.0.mlp.down_proj"]},
    "excluded_by_regex": {"exclude_modules": r".*layers\.0\..*"},
    "bfloat16": {"dtype": torch.bfloat16},
    "gaussian": {"init_lora_weights": "gaussian"},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    "mica": {"init_lora_weights": "mica"},
    "suffix_with_a_block": {"targets": ("self_attn.q_proj", "mlp.up_proj")},
    "full_names": {"targets": ("model.layers.1.self_attn.q_proj", "model.layers.0.mlp.up_proj")},
    "full_name_is_not_bound_to_layers": {
        "targets": ("model.layers.0.self_attn.q_proj", "up_proj"),
        "layers": [1],
    },
}


def peft_deltas(model_dir: Path, adapter: Path) -> dict[str, torch.Tensor]:
    """Module name -> delta weight, float32, as PEFT applies the saved adapter."""
    config = transformers.AutoConfig.from_pretrained(model_dir)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model = peft.PeftModel.from_pretrained(base, str(adapter))
    return {
        name.removeprefix("base_model.model."): module.get_delta_weight("default").detach()
        for name, module in model.named_modules()
        if isinstance(module, LoraLayer)
    }


def peft_rows(model_dir: Path, adapter: Path) -> dict[str, torch.Tensor]:
    """Magnitudes and scaled biases of lora_B by module and role, as PEFT has read them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        model = peft.PeftModel.from_pretrained(base, str(adapter))
    rows = {}
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            stem = name.removeprefix("base_model.model.")
            bias = module.lora_B["default"].bias
            if bias is not None:
                rows[f"{stem} bias"] = bias.detach() * module.scaling["default"]
            if "default" in module.lora_magnitude_vector:
                rows[f"{stem} magnitude"] = module.lora_magnitude_vector["default"].weight.detach()
    return rows


def assert_same_deltas(model_dir: Path, adapter: Path, spec: ModelSpec) -> None:
    revision = read_adapter(adapter, spec)
    expected = peft_deltas(model_dir, adapter)
    assert {module_name(*place) for place in revision.modules} == set(expected)
    assert revision.applied == revision.expected == len(expected) > 0
    for place, module in revision.modules.items():
        delta = (module.b.float() @ module.a.float()) * module.scale
        torch.testing.assert_close(delta, expected[module_name(*place)], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_deltas_equal_pefts(case: str, model_dir: Path, spec: ModelSpec, tmp_path: Path) -> None:
    adapter = make_peft_adapter(tmp_path / "adapter", model_dir, **CASES[case])
    assert_same_deltas(model_dir, adapter, spec)


@pytest.mark.parametrize("site", SITES)
def test_each_site_alone_equals_peft(
    site: str, model_dir: Path, spec: ModelSpec, tmp_path: Path
) -> None:
    adapter = make_peft_adapter(tmp_path / "adapter", model_dir, targets=[site], seed=3)
    assert_same_deltas(model_dir, adapter, spec)


@pytest.mark.parametrize(
    "regex", [r".*\.(q|v)_proj", r"model\.layers\.1\..*_proj", ".*mlp.*proj", "all-linear"]
)
def test_target_regex_equals_peft(
    regex: str, model_dir: Path, spec: ModelSpec, tmp_path: Path
) -> None:
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=regex, init_lora_weights=False)
    base = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(model_dir)
    )
    peft.get_peft_model(base, config).save_pretrained(tmp_path, save_embedding_layers=False)
    saved = json.loads((tmp_path / "adapter_config.json").read_text())
    saved["target_modules"] = regex  # PEFT writes the list that all-linear stood for
    (tmp_path / "adapter_config.json").write_text(json.dumps(saved))
    assert_same_deltas(model_dir, tmp_path, spec)


def test_patterns_are_tried_in_the_order_of_the_file(
    model_dir: Path, spec: ModelSpec, tmp_path: Path
) -> None:
    adapter = make_peft_adapter(tmp_path, model_dir)
    saved = json.loads((adapter / "adapter_config.json").read_text())
    saved["alpha_pattern"] = {"q_proj": 7.0, ".*_proj": 5.0, "k_proj": 3.0}
    (adapter / "adapter_config.json").write_text(json.dumps(saved))
    assert_same_deltas(model_dir, adapter, spec)
    scales = {m.scale for m in read_adapter(adapter, spec).modules.values()}
    assert scales == {7.0 / 4, 5.0 / 4}


def test_scales_named_by_the_issue_reports(
    model_dir: Path, spec: ModelSpec, tmp_path: Path
) -> None:
    rslora = make_peft_adapter(tmp_path / "rs", model_dir, r=16, alpha=16, rslora=True)
    assert {m.scale for m in read_adapter(rslora, spec).modules.values()} == {4.0}
    raw = make_peft_adapter(tmp_path / "raw", model_dir, r=8, alpha=16)
    assert {m.scale for m in read_adapter(raw, spec).modules.values()} == {2.0}
    pattern = make_peft_adapter(tmp_path / "pattern", model_dir, **CASES["patterns_for_one_layer"])
    scales = {place: m.scale for place, m in read_adapter(pattern, spec).modules.items()}
    assert all(scale == (4.0 if layer == 1 else 2.0) for (layer, _), scale in scales.items())


@pytest.mark.parametrize(
    "fields",
    [
        {"use_dora": True},
        {"use_dora": True, "dtype": torch.bfloat16, "rank_pattern": {"k_proj": 2}},
        {"use_dora": True, "init_lora_weights": "gaussian", "targets": ("o_proj",)},
        {"lora_bias": True},
        {"lora_bias": True, "alpha_pattern": {"v_proj": 3}, "rslora": True},
    ],
    ids=str,
)
def test_magnitudes_and_biases_equal_pefts(
    fields: dict[str, Any], model_dir: Path, spec: ModelSpec, tmp_path: Path
) -> None:
    adapter = make_peft_adapter(tmp_path / "adapter", model_dir, **fields)
    found = {}
    for place, module in read_adapter(adapter, spec).modules.items():
        if module.bias is not None:
            found[f"{module_name(*place)} bias"] = module.bias.float() * module.scale
        if module.magnitude is not None:
            found[f"{module_name(*place)} magnitude"] = module.magnitude.float()
    expected = peft_rows(model_dir, adapter)
    assert found.keys() == expected.keys() and expected
    for name, row in expected.items():
        torch.testing.assert_close(found[name], row, msg=name)
    if "use_dora" not in fields:  # else a delta is not all that PEFT computes
        assert_same_deltas(model_dir, adapter, spec)


@pytest.mark.parametrize("kind", ["mistral", "qwen2", "qwen3"])
def test_other_families_equal_peft(kind: Any, tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "base", kind)
    adapter = make_peft_adapter(tmp_path / "adapter", base)
    assert_same_deltas(base, adapter, ModelSpec.from_directory(base))


def test_every_field_of_pefts_config_is_classified_once() -> None:
    groups = (APPLIED, HARMLESS, frozenset(REFUSED))
    fields = {field.name for field in dataclasses.fields(peft.LoraConfig)}
    assert fields <= frozenset().union(*groups)
    assert sum(map(len, groups)) == len(frozenset().union(*groups))
