"""Rotary tables equal transformers'."""

from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tp_engine.models.fields import Fields, UnsupportedModel
from tp_engine.models.rope import RopeSpec, cos_sin_table, inverse_frequencies

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0}
ORIGINAL = {"original_max_position_embeddings": 32}


def read(rope: dict[str, Any], positions: int = 128, **top: Any) -> RopeSpec:
    return RopeSpec.from_config(Fields({"rope_parameters": rope, **top}, "config.json"), positions)


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("theta", [100.0, 1e4, 5e5])
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 2.5},
        {**LLAMA3, **ORIGINAL},
        {**LLAMA3, "original_max_position_embeddings": 8192},
        LLAMA3,
        {**LLAMA3, **ORIGINAL, "low_freq_factor": 0.5, "high_freq_factor": 2.0},
        {**YARN, **ORIGINAL},
        YARN,
        {"rope_type": "yarn", "factor": 0.5, **ORIGINAL},
        {"rope_type": "yarn", "factor": 32, "original_max_position_embeddings": 4096},
        {**YARN, **ORIGINAL, "beta_fast": 16, "beta_slow": 2},
        {**YARN, **ORIGINAL, "beta_fast": 2, "beta_slow": 2},
        {**YARN, **ORIGINAL, "truncate": False},
        {**YARN, **ORIGINAL, "attention_factor": 1.3},
        {**YARN, **ORIGINAL, "mscale": 0.7, "mscale_all_dim": 1.2},
        {**YARN, **ORIGINAL, "mscale": 0.7},
        {**YARN, **ORIGINAL, "mscale": 1.0, "mscale_all_dim": 1.0, "attention_factor": None},
    ],
    ids=str,
)
def test_variants_equal_transformers(rope: dict[str, Any], theta: float, head_dim: int) -> None:
    config = transformers.LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=128,
        rope_parameters={"rope_theta": theta, **rope},
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[str(rope["rope_type"])](config)
    spec = read({"rope_theta": theta, **rope})
    torch.testing.assert_close(inverse_frequencies(spec, head_dim), frequencies, rtol=1e-6, atol=0)
    assert spec.attention_factor == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize("rope", [{}, {**YARN, **ORIGINAL}], ids=["default", "yarn"])
def test_table_equals_transformers(rope: dict[str, Any]) -> None:
    config = transformers.LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        max_position_embeddings=128,
        rope_parameters={"rope_theta": 1e4, **rope} if rope else None,
    )
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    cos, sin = rotary(torch.zeros(1), torch.arange(300)[None])
    table = cos_sin_table(read(rope), 16, 300)
    assert table.dtype == torch.float32
    torch.testing.assert_close(table[:, :8], cos[0, :, :8], rtol=0, atol=1e-5)
    torch.testing.assert_close(table[:, 8:], sin[0, :, 8:], rtol=0, atol=1e-5)


def test_older_fields_mean_the_same() -> None:
    old = {"type": "linear", "factor": 2.0}
    config = Fields({"rope_theta": 500.0, "rope_scaling": old}, "config.json")
    new = read({"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0})
    assert RopeSpec.from_config(config, 128) == new
    assert RopeSpec.from_config(Fields({}, "config.json"), 128) == RopeSpec(theta=10_000.0)
    assert read({**YARN}, original_max_position_embeddings=64).original_positions == 64


@pytest.mark.parametrize(
    ("rope", "top", "named"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, {}, "rope_type='dynamic'"),
        ({"rope_type": "longrope"}, {}, "rope_type='longrope'"),
        ({"type": "mrope", "mrope_section": [1]}, {}, "rope_type='mrope'"),
        ({"factor": 2.0}, {}, "factor=2.0"),
        ({"rope_type": "linear"}, {}, "factor is missing"),
        ({"rope_type": "linear", "factor": "2"}, {}, "factor='2'"),
        ({"rope_type": "linear", "factor": 2.0, "beta_fast": 3}, {}, "beta_fast=3"),
        ({"rope_type": "linear", "factor": float("nan")}, {}, "factor=nan"),
        ({"rope_type": "default", "rope_theta": 1}, {}, "rope_theta=1"),
        ({"partial_rotary_factor": 0.5}, {}, "partial_rotary_factor=0.5"),
        ({}, {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"full_attention": {"rope_type": "default"}}, {}, "full_attention"),
        ({**LLAMA3, "high_freq_factor": 1.0}, {}, "high_freq_factor=1.0"),
    ],
    ids=str,
)
def test_what_is_not_computed_is_refused_by_name(
    rope: dict[str, Any], top: dict[str, Any], named: str
) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        read(rope, **top)
    assert named in str(caught.value)
