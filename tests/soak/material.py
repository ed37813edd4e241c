"""The model, its tokenizer and the adapters of a soak.

The tokenizer has one token for each of 122 ASCII characters, so that the ids of an answer can be
read off its text.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.helpers.tiny_models import ALL_TARGETS, make_checkpoint
from tests.helpers.tiny_tokenizer import SPECIAL

VOCABULARY = 128
CONTEXT = 256
LAYERS = 2
CHARACTERS = [chr(code) for code in range(128)][-(VOCABULARY - len(SPECIAL)) :]
RANKS = (4, 8, 16, 32, 64)
TARGETS = (
    *[ALL_TARGETS] * 3,
    ALL_TARGETS[:4],
    ("q_proj", "v_proj"),
    (*ALL_TARGETS, "lm_head"),
    ("o_proj", "embed_tokens"),
)
_SIZES = {  # in, out
    "q_proj": (64, 64),
    "k_proj": (64, 32),
    "v_proj": (64, 32),
    "o_proj": (64, 64),
    "gate_proj": (64, 128),
    "up_proj": (64, 128),
    "down_proj": (128, 64),
    "lm_head": (64, VOCABULARY),
    "embed_tokens": (VOCABULARY, 64),
}
_ID_OF = {text: number for number, text in enumerate((*SPECIAL, *CHARACTERS))}
_TOKEN = re.compile("|".join([*map(re.escape, SPECIAL), "."]), re.DOTALL)


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """An adapter on disk."""

    path: Path
    rank: int
    targets: tuple[str, ...]


def make_model(path: Path) -> Path:
    """A tiny Llama and its tokenizer."""
    make_checkpoint(path, "llama", vocab_size=VOCABULARY, max_position_embeddings=CONTEXT)
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    spelt = [letters.pre_tokenize_str(character)[0][0] for character in CHARACTERS]
    vocabulary = {token: number for number, token in enumerate((*SPECIAL, *spelt))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = letters
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=SPECIAL[0], bos_token=SPECIAL[1], eos_token=SPECIAL[2]
    )
    fast.add_special_tokens({"additional_special_tokens": list(SPECIAL[3:])})
    fast.save_pretrained(path)
    return path


def ids_of(text: str) -> list[int]:
    """The token ids that an answer's text stands for.

    Raises:
        KeyError: there is no such token.
    """
    return [_ID_OF[token] for token in _TOKEN.findall(text)]


def make_variants(root: Path, count: int, seed: int) -> list[Variant]:
    """Adapters of mixed LoRA ranks, modules, layers and scalings, each in its own directory."""
    rng = random.Random(seed)
    return [_make_variant(root / f"v{number:03}", rng) for number in range(count)]


def make_broken(path: Path) -> Path:
    """An adapter that must be refused: one of its numbers is not finite."""
    _make_variant(path, random.Random(0))
    weights = path / "adapter_model.safetensors"
    tensors = load_file(weights)
    tensors[min(tensors)][0, 0] = float("nan")
    save_file(tensors, weights)
    return path


def _make_variant(path: Path, rng: random.Random) -> Variant:
    rank = rng.choice(RANKS)
    targets: tuple[str, ...] = rng.choice(TARGETS)
    layers: list[int] | None = None
    extra = ""
    if set(targets) <= set(ALL_TARGETS):
        layers = [1] if rng.random() < 0.2 else None
        extra = rng.choice(["", "", "", "", "use_dora", "lora_bias"])
    rslora = rng.random() < 0.2
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    path.mkdir(parents=True)
    tensors = _tensors(rank, targets, range(LAYERS) if layers is None else layers, generator)
    if extra:
        tensors |= _extra(extra, tensors, generator)
    save_file(tensors, path / "adapter_model.safetensors")
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank**0.5 if rslora else 2 * rank,
        "use_rslora": rslora,
        "target_modules": list(targets),
        "layers_to_transform": layers,
        **({extra: True} if extra else {}),
    }
    (path / "adapter_config.json").write_text(json.dumps(config))
    return Variant(path=path, rank=rank, targets=tuple(targets))


def _tensors(
    rank: int, targets: Sequence[str], layers: Sequence[int], generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """Of a delta that is about half as large as the base's weights, whatever the rank."""
    tensors = {}
    for module in _modules(targets, layers):
        rows, columns = _SIZES[module.rpartition(".")[2]]
        a = torch.randn(rank, rows, generator=generator) * rows**-0.5
        b = torch.randn(columns, rank, generator=generator) * 0.4 * rank**-0.5
        if module.endswith("embed_tokens"):
            names = ("lora_embedding_A", "lora_embedding_B")
        else:
            names = ("lora_A.weight", "lora_B.weight")
        pair = zip(names, (a, b), strict=True)
        tensors |= {f"base_model.model.{module}.{name}": each for name, each in pair}
    return tensors


def _extra(
    what: str, tensors: dict[str, torch.Tensor], generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """Magnitudes of DoRA, of the size of the rows of base and delta, or biases of B."""
    outputs = {name: b.shape[0] for name, b in tensors.items() if name.endswith("lora_B.weight")}
    if what == "lora_bias":
        return {
            name.replace("weight", "bias"): torch.randn(size, generator=generator) * 0.2
            for name, size in outputs.items()
        }
    return {
        name.replace("lora_B.weight", "lora_magnitude_vector"): 1.4
        + 0.6 * torch.rand(size, generator=generator)
        for name, size in outputs.items()
    }


def _modules(targets: Sequence[str], layers: Sequence[int]) -> list[str]:
    linear = [target for target in targets if target in ALL_TARGETS]
    blocks = {target: "mlp" if target in ALL_TARGETS[4:] else "self_attn" for target in linear}
    modules = [f"model.layers.{n}.{block}.{t}" for n in layers for t, block in blocks.items()]
    ends = {"lm_head": "lm_head", "embed_tokens": "model.embed_tokens"}
    return modules + [name for target, name in ends.items() if target in targets]
