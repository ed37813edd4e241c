"""What a model computes, read from its ``config.json`` before any weight is.

Every field that changes the computation is applied here or refused by name; see
`tp_engine.models.families.NEUTRAL` for the fields that are refused and for those passed over.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import torch

from sharding import ModelDims
from tp_engine.models.families import Family, check_neutral, find_family
from tp_engine.models.fields import Fields
from tp_engine.models.rope import RopeSpec

__all__ = ["ModelSpec"]

_DTYPES: Final = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """Sizes and rules of one decoder; see `from_directory`."""

    architecture: str
    """transformers' class name, such as LlamaForCausalLM."""
    vocab_size: int
    """Rows of the embedding and of the LM head."""
    hidden_size: int
    """Width of the residual stream."""
    intermediate_size: int
    """Width of the MLP."""
    num_layers: int
    """Decoder layers."""
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Key and value heads."""
    head_dim: int
    """Width of a head, even."""
    rms_norm_eps: float
    """Added to the mean square in every norm."""
    rope: RopeSpec
    """Rotary positions."""
    max_position_embeddings: int
    """Positions the model was made for; with yarn at least original context times factor."""
    tie_word_embeddings: bool
    """Whether the LM head is the embedding."""
    qkv_bias: bool
    """Whether q, k and v have a bias."""
    o_bias: bool
    """Whether the attention's output projection has one."""
    mlp_bias: bool
    """Whether gate, up and down have one."""
    qk_norm: bool
    """Whether each query and key head is normalised before it is rotated."""
    windows: tuple[int | None, ...]
    """Sliding window of each layer: a row sees itself and the window - 1 rows before; None: all."""
    eos_token_ids: tuple[int, ...]
    """Tokens that end a text, of config.json and generation_config.json, ascending."""
    torch_dtype: torch.dtype
    """Type that the checkpoint's author computed in."""
    quantization: Literal["nf4"] | None
    """``nf4``: layers may be stored as bitsandbytes NF4; which ones, the tensors say."""

    @classmethod
    def from_directory(cls, directory: Path | str) -> ModelSpec:
        """Read ``config.json`` and, when there is one, ``generation_config.json``.

        Raises:
            UnsupportedModel: naming the architecture or the field, its value and what is allowed.
        """
        config = Fields.from_file(Path(directory) / "config.json")
        generation = Path(directory) / "generation_config.json"
        extra = Fields.from_file(generation) if generation.is_file() else None
        return cls.from_config(config, extra)

    @classmethod
    def from_config(cls, config: Fields, generation: Fields | None = None) -> ModelSpec:
        """As `from_directory`, from fields already read."""
        architecture, family = find_family(config)
        check_neutral(config, family)
        positions = config.integer("max_position_embeddings", family.positions)
        rope = RopeSpec.from_config(config, positions)
        if rope.rope_type == "yarn":
            positions = max(positions, int(rope.original_positions * rope.factor))
        heads = config.integer("num_attention_heads")
        kv_heads = _kv_heads(config, family, heads)
        layers = config.integer("num_hidden_layers")
        attention_bias = config.flag("attention_bias", False)
        return cls(
            architecture=architecture,
            vocab_size=config.integer("vocab_size"),
            hidden_size=config.integer("hidden_size"),
            intermediate_size=config.integer("intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=_head_dim(config, family, heads),
            rms_norm_eps=config.number("rms_norm_eps", 1e-6),
            rope=rope,
            max_position_embeddings=positions,
            tie_word_embeddings=config.flag("tie_word_embeddings", False),
            qkv_bias=_bias(family.qkv_bias, attention_bias),
            o_bias=_bias(family.o_bias, attention_bias),
            mlp_bias=_bias(family.mlp_bias, config.flag("mlp_bias", False)),
            qk_norm=family.qk_norm,
            windows=_windows(config, family, layers),
            eos_token_ids=_eos_ids(config, generation, family),
            torch_dtype=_dtype(config),
            quantization=_quantization(config),
        )

    def dims(self) -> ModelDims:
        """The sizes that decide how the model is cut."""
        return ModelDims(
            layers=self.num_layers,
            hidden=self.hidden_size,
            intermediate=self.intermediate_size,
            heads=self.num_heads,
            kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            vocab=self.vocab_size,
        )


def _bias(rule: str, configured: bool) -> bool:
    return rule == "always" or (rule == "configured" and configured)


def _kv_heads(config: Fields, family: Family, heads: int) -> int:
    # Null means "as many as query heads" in every family; only an absent field has a default.
    null = config.is_null("num_key_value_heads") or family.kv_heads is None
    count = config.integer("num_key_value_heads", heads if null else family.kv_heads)
    if heads % count:
        allowed = f"a divisor of num_attention_heads={heads}"
        raise config.refuse("num_key_value_heads", allowed, count)
    return count


def _head_dim(config: Fields, family: Family, heads: int) -> int:
    hidden = config.integer("hidden_size")
    if config.get("head_dim") is None and family.head_dim is None and hidden % heads:
        raise config.refuse("hidden_size", f"a multiple of num_attention_heads={heads}")
    width = config.integer("head_dim", family.head_dim or hidden // heads)
    if width % 2:
        raise config.refuse("head_dim", "even, since rotary positions turn pairs", width)
    return width


def _windows(config: Fields, family: Family, layers: int) -> tuple[int | None, ...]:
    """The rule of each family, checked against ``layer_types`` where the file has them."""
    window = None
    if family.windows == "all" and not config.is_null("sliding_window"):
        window = config.integer("sliding_window", 4096)
    elif family.windows == "layers" and config.flag("use_sliding_window", False):
        null = config.is_null("sliding_window")
        window = None if null else config.integer("sliding_window", 4096)
    types = config.get("layer_types")
    if types is None:
        full = config.integer("max_window_layers", 28, low=0) if family.windows == "layers" else 0
        return tuple(window if layer >= full else None for layer in range(layers))
    known: dict[Any, int | None] = {"full_attention": None}
    if family.windows == "all" and window is not None:
        known = {}
    if window is not None:
        known["sliding_attention"] = window
    if not isinstance(types, list) or len(types) != layers or any(t not in known for t in types):
        raise config.refuse("layer_types", f"{layers} of {', '.join(known)}")
    return tuple(known[name] for name in types)


def _eos_ids(config: Fields, generation: Fields | None, family: Family) -> tuple[int, ...]:
    null = config.is_null("eos_token_id")
    ids = set(config.ids("eos_token_id", () if null else family.eos))
    if generation is not None:
        ids |= set(generation.ids("eos_token_id"))
    return tuple(sorted(ids))


def _dtype(config: Fields) -> torch.dtype:
    field = "torch_dtype" if config.get("dtype") is None else "dtype"
    name = config.get(field) or "float32"
    if not isinstance(name, str) or name.removeprefix("torch.") not in _DTYPES:
        raise config.refuse(field, "one of " + ", ".join(_DTYPES))
    return _DTYPES[name.removeprefix("torch.")]


def _quantization(config: Fields) -> Literal["nf4"] | None:
    """bitsandbytes NF4 or nothing. Other fields of it do not change what the stored bits mean."""
    found = config.object("quantization_config")
    if found is None:
        return None
    four_bit = found.get("load_in_4bit") is True
    method = found.get("quant_method") or ("bitsandbytes" if four_bit else None)
    if method != "bitsandbytes":
        raise found.refuse("quant_method", "'bitsandbytes' with NF4", method)
    if not four_bit:
        raise found.refuse("load_in_4bit", "true")
    if found.get("bnb_4bit_quant_type") != "nf4":
        raise found.refuse("bnb_4bit_quant_type", "'nf4'")
    return "nf4"
