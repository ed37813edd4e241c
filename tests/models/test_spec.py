"""Every field of config.json is applied, refused by name, or known not to matter."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.helpers.tiny_models import KINDS, make_checkpoint
from tp_engine.models import ModelSpec, UnsupportedModel
from tp_engine.models.fields import Fields

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}


def read(generation: dict[str, Any] | None = None, **changes: Any) -> ModelSpec:
    extra = None if generation is None else Fields(generation, "generation_config.json")
    return ModelSpec.from_config(Fields({**BASE, **changes}, "config.json"), extra)


def of(kind: str, **changes: Any) -> ModelSpec:
    names = {"mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "llama": "Llama"}
    architecture = [f"{names[kind]}ForCausalLM"]
    changes = {"num_key_value_heads": 2, **changes}
    return read(architectures=architecture, model_type=kind, **changes)


@pytest.mark.parametrize("kind", KINDS)
def test_defaults_are_those_of_transformers(kind: str) -> None:
    sizes = {k: v for k, v in BASE.items() if k not in ("architectures", "model_type")}
    config = transformers.AutoConfig.for_model(kind, num_key_value_heads=2, **sizes)
    spec = of(kind)
    assert spec.head_dim == (getattr(config, "head_dim", None) or 64 // 4)
    assert spec.max_position_embeddings == config.max_position_embeddings
    assert spec.rms_norm_eps == config.rms_norm_eps
    assert spec.tie_word_embeddings == config.tie_word_embeddings
    assert spec.rope.theta == config.rope_parameters["rope_theta"]
    eos = config.eos_token_id
    assert spec.eos_token_ids == (() if eos is None else (eos,))
    window = config.sliding_window if kind == "mistral" else None
    assert spec.windows == (window,) * 3


def test_key_value_heads_absent_null_and_given() -> None:
    assert read().num_kv_heads == 4
    assert of("qwen2", num_key_value_heads=None).num_kv_heads == 4
    assert of("mistral", num_key_value_heads=1).num_kv_heads == 1


def test_a_directory_of_transformers_is_read(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "m", "qwen3", nf4=True, dtype=torch.bfloat16)
    spec = ModelSpec.from_directory(directory)
    assert spec.architecture == "Qwen3ForCausalLM"
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (4, 2, 32)
    assert (spec.qkv_bias, spec.o_bias, spec.mlp_bias, spec.qk_norm) == (False, False, False, True)
    assert spec.quantization == "nf4"
    assert spec.torch_dtype == torch.bfloat16
    assert spec.dims().head_dim == 32


def test_biases_by_family() -> None:
    def biases(spec: ModelSpec) -> tuple[bool, bool, bool]:
        return spec.qkv_bias, spec.o_bias, spec.mlp_bias

    assert biases(of("qwen2")) == (True, False, False)
    assert biases(of("llama", attention_bias=True)) == (True, True, False)
    assert biases(of("llama", mlp_bias=True)) == (False, False, True)
    assert biases(of("qwen3", attention_bias=True)) == (True, True, False)
    assert biases(of("mistral")) == (False, False, False)


def test_windows_by_family() -> None:
    assert of("mistral", sliding_window=None).windows == (None,) * 3
    assert of("mistral", sliding_window=8).windows == (8,) * 3
    assert of("qwen2", sliding_window=8).windows == (None,) * 3
    used = {"use_sliding_window": True, "sliding_window": 8}
    assert of("qwen2", **used, max_window_layers=1).windows == (None, 8, 8)
    types = ["full_attention", "sliding_attention", "full_attention"]
    assert of("qwen3", **used, layer_types=types).windows == (None, 8, None)
    assert (
        of("mistral", sliding_window=8, layer_types=["sliding_attention"] * 3).windows == (8,) * 3
    )


def test_yarn_extends_the_positions() -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100}
    assert read(rope_scaling=rope, max_position_embeddings=100).max_position_embeddings == 400
    assert read(rope_scaling=rope, max_position_embeddings=500).max_position_embeddings == 500


def test_end_tokens_of_both_files() -> None:
    assert read({"eos_token_id": [7, 3]}, eos_token_id=5).eos_token_ids == (3, 5, 7)
    assert read({}, eos_token_id=[5, 4]).eos_token_ids == (4, 5)
    assert read({"eos_token_id": 9}, eos_token_id=None).eos_token_ids == (9,)


def test_model_type_decides_without_architectures() -> None:
    assert read(architectures=None, model_type="qwen2", num_key_value_heads=2).qkv_bias


def test_harmless_fields_are_passed_over() -> None:
    plain = read()
    assert plain == read(
        attention_dropout=0.1,
        initializer_range=0.5,
        pretraining_tp=2,
        use_cache=False,
        sliding_window=None,
        partial_rotary_factor=1.0,
        logit_scale=1,
        _name_or_path="x",
        transformers_version="4.1",
        my_notes={"any": "thing"},
    )


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures=['GPT2LMHeadModel']"),
        ({"architectures": ["LlamaForCausalLM", "MistralForCausalLM"]}, "architectures="),
        ({"architectures": "LlamaForCausalLM"}, "architectures='LlamaForCausalLM'"),
        ({"architectures": None, "model_type": "gpt2"}, "model_type='gpt2'"),
        ({"model_type": "qwen2"}, "model_type='qwen2'"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"sliding_window": 8}, "sliding_window=8"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type='dynamic'"),
        ({"rope_scaling": 4}, "rope_scaling=4"),
        ({"layer_types": ["sliding_attention"] * 3}, "layer_types="),
        ({"layer_types": ["full_attention"] * 2}, "layer_types="),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
        ({"num_attention_heads": 0}, "num_attention_heads=0"),
        ({"num_attention_heads": True}, "num_attention_heads=True"),
        ({"num_attention_heads": 5}, "hidden_size=64"),
        ({"head_dim": 15}, "head_dim=15"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps='1e-6'"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes'"),
        ({"eos_token_id": [-1]}, "eos_token_id=[-1]"),
        ({"torch_dtype": "float8_e4m3fn"}, "torch_dtype='float8_e4m3fn'"),
        ({"num_local_experts": 8}, "num_local_experts=8"),
        ({"embedding_multiplier": 12.0}, "embedding_multiplier=12.0"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
        ({"vision_config": {}}, "vision_config={}"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quant_method='gptq'"),
        ({"quantization_config": {"load_in_8bit": True}}, "quant_method=None"),
        (
            {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}},
            "load_in_4bit=None",
        ),
        (
            {"quantization_config": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}},
            "bnb_4bit_quant_type='fp4'",
        ),
    ],
    ids=str,
)
def test_what_is_not_computed_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        read(**changes)
    assert named in str(caught.value)


@pytest.mark.parametrize("field", ["attention_bias", "mlp_bias"])
def test_biases_that_a_family_lacks_are_refused(field: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"{field}=True"):
        of("mistral", **{field: True})


def test_window_without_a_size_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="layer_types"):
        of("qwen2", layer_types=["sliding_attention"] * 3)


@pytest.mark.parametrize("text", ["", "[]", "{", "nul", "\ufffd{", "[" * 100000])
def test_corrupt_files_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UnsupportedModel, match=r"config\.json"):
        ModelSpec.from_directory(tmp_path)


def test_missing_and_oversized_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="No such file"):
        ModelSpec.from_directory(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"x": "y" * (1 << 20)}))
    with pytest.raises(UnsupportedModel, match="larger than"):
        ModelSpec.from_directory(tmp_path)
