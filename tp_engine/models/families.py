"""The model families that the engine computes, and what sets each apart.

All are pre-norm decoders with rotary positions, grouped KV heads and a gated SiLU MLP. Defaults are
those of the family's transformers config class, for files that leave a field out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

from tp_engine.models.fields import Fields

__all__ = ["FAMILIES", "Family", "check_neutral", "find_family"]

Bias = Literal["always", "never", "configured"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """One architecture."""

    model_type: str
    """transformers' name of the family."""
    qkv_bias: Bias
    """Biases of q, k and v; configured: the field ``attention_bias``."""
    o_bias: Bias
    """Bias of the attention's output projection, likewise."""
    mlp_bias: Bias
    """Biases of the MLP; configured: the field ``mlp_bias``."""
    qk_norm: bool
    """An RMS norm on each query and key head."""
    windows: Literal["none", "all", "layers"]
    """Which layers a sliding window can hold for."""
    positions: int
    """Default of ``max_position_embeddings``."""
    kv_heads: int | None
    """Default of ``num_key_value_heads``; None: as many as query heads."""
    head_dim: int | None
    """Default of ``head_dim``; None: hidden size by heads."""
    eos: tuple[int, ...]
    """Default of ``eos_token_id``."""


FAMILIES: Final[dict[str, Family]] = {
    "LlamaForCausalLM": Family(
        model_type="llama",
        qkv_bias="configured",
        o_bias="configured",
        mlp_bias="configured",
        qk_norm=False,
        windows="none",
        positions=2048,
        kv_heads=None,
        head_dim=None,
        eos=(2,),
    ),
    "MistralForCausalLM": Family(
        model_type="mistral",
        qkv_bias="never",
        o_bias="never",
        mlp_bias="never",
        qk_norm=False,
        windows="all",
        positions=131072,
        kv_heads=8,
        head_dim=None,
        eos=(2,),
    ),
    "Qwen2ForCausalLM": Family(
        model_type="qwen2",
        qkv_bias="always",
        o_bias="never",
        mlp_bias="never",
        qk_norm=False,
        windows="layers",
        positions=32768,
        kv_heads=32,
        head_dim=None,
        eos=(),
    ),
    "Qwen3ForCausalLM": Family(
        model_type="qwen3",
        qkv_bias="configured",
        o_bias="configured",
        mlp_bias="never",
        qk_norm=True,
        windows="layers",
        positions=32768,
        kv_heads=32,
        head_dim=128,
        eos=(),
    ),
}

NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "hidden_act": ("silu", "swish"),
    "hidden_activation": ("silu", "swish"),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "pruned_heads": ({},),
    "per_layer_config": (),
    "compression_config": (),
    "text_config": (),
    "vision_config": (),
    "audio_config": (),
    "num_experts": (0, 1),
    "num_local_experts": (0, 1),
    "n_routed_experts": (0, 1),
    "clip_qkv": (),
    "use_qk_norm": (False,),
    "qk_layernorm": (False,),
    "use_parallel_residual": (False,),
    "no_rope_layers": (),
    "no_rope_layer_interval": (),
    "rope_interleaved": (False,),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "query_pre_attn_scalar": (),
    "attention_multiplier": (),
    "embedding_multiplier": (1,),
    "residual_multiplier": (1,),
    "logits_scaling": (1,),
    "logit_scale": (1,),
    "scale_emb": (1,),
    "scale_depth": (),
}
"""Fields that change the computation in some model, and the values with which they do not.

Null is neutral always. Any other unknown field is passed over, as transformers does: it does not
reach the computation of these families (dropout, initialisation, caches, token ids, notes).
"""


def find_family(config: Fields) -> tuple[str, Family]:
    """The architecture's name and family.

    ``model_type`` decides where ``architectures`` is absent, as in transformers.

    Raises:
        UnsupportedModel: an unknown architecture, more than one, or two that disagree.
    """
    allowed = "one of " + ", ".join(FAMILIES)
    listed = config.get("architectures")
    model_type = config.get("model_type")
    if not listed:
        for name, family in FAMILIES.items():
            if family.model_type == model_type:
                return name, family
        raise config.refuse("model_type", "architectures is absent, and it is no known type")
    if not isinstance(listed, list) or len(listed) != 1 or listed[0] not in FAMILIES:
        raise config.refuse("architectures", allowed)
    family = FAMILIES[listed[0]]
    if model_type not in (None, family.model_type):
        raise config.refuse("model_type", f"{listed[0]} goes with {family.model_type!r}")
    return listed[0], family


def check_neutral(config: Fields, family: Family) -> None:
    """Refuse fields that would change the computation and that nothing here applies.

    Raises:
        UnsupportedModel: naming the field.
    """
    for name, values in NEUTRAL.items():
        value = config.get(name)
        if value is not None and value not in values:
            allowed = " or ".join(map(repr, values)) or "absent or null"
            raise config.refuse(name, f"must be {allowed}")
    if family.windows == "none" and config.get("sliding_window") is not None:
        raise config.refuse("sliding_window", f"{family.model_type} attends to everything")
    if family.qkv_bias == "never" and config.flag("attention_bias", False):
        raise config.refuse("attention_bias", f"{family.model_type} has no such bias")
    if family.mlp_bias == "never" and config.flag("mlp_bias", False):
        raise config.refuse("mlp_bias", f"{family.model_type} has no such bias")
