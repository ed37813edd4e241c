"""Random checkpoints and adapters, written as files: plain, and NF4 as bitsandbytes stores it.

Values are large enough that logits spread over several units, so that greedy tokens can be
compared.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from kernels.nf4 import NF4_CODE
from sharding import SITES, cut_model, weight_slice
from tp_engine.models import ModelSpec
from tp_engine.weights.loader import module_name

BLOCK, NESTED = 64, 256
"""Elements of an NF4 block, and its scales of a block of theirs."""
STD_OF_CODES = 0.54
"""Of the 16 NF4 values, taken equally often."""

UNEVEN: dict[str, dict[str, int]] = {
    "9 heads in 3 groups": {
        "hidden_size": 144,
        "intermediate_size": 328,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    },
    "28 heads in 4 groups": {
        "hidden_size": 448,
        "intermediate_size": 704,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
}
"""Sizes that no even number of ranks divides: heads, 64-blocks of the MLP, the vocabulary."""
COMMON: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "num_hidden_layers": 3,
    "head_dim": 16,
    "vocab_size": 1000,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
QUANTIZATION = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "bnb_4bit_quant_storage": "uint8",
    "bnb_4bit_compute_dtype": "float32",
}


def write_checkpoint(directory: Path, sizes: Mapping[str, int], *, nf4: bool, seed: int) -> Path:
    """A Llama decoder of 3 layers with random weights; NF4 ones with double quantisation."""
    directory.mkdir(parents=True)
    config: dict[str, Any] = {**COMMON, **sizes}
    if nf4:
        config["quantization_config"] = QUANTIZATION
    (directory / "config.json").write_text(json.dumps(config))
    spec = ModelSpec.from_directory(directory)
    random = torch.Generator().manual_seed(seed)
    save_file(dict(_tensors(spec, nf4, random)), directory / "model.safetensors")
    return directory


def write_adapter(
    directory: Path, spec: ModelSpec, rank: int, sites: Sequence[str] = SITES
) -> Path:
    """Random A and B of a LoRA rank for some linears of every layer, with a scale of 2."""
    random = torch.Generator().manual_seed(rank)
    tensors = {}
    for name, rows, columns in _linears(spec, sites):
        key = f"base_model.model.{name}"
        tensors[f"{key}.lora_A.weight"] = _normal(random, columns**-0.5, rank, columns)
        tensors[f"{key}.lora_B.weight"] = _normal(random, 0.1, rows, rank)
    directory.mkdir(parents=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": [*sites]}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def _linears(spec: ModelSpec, sites: Sequence[str]) -> Iterator[tuple[str, int, int]]:
    """Name, out-features and in-features of linears of every layer."""
    dims = spec.dims()
    (whole,) = cut_model(dims, 1)
    for index, layer in enumerate(whole.layers):
        for site in sites:
            part = weight_slice(dims, layer, site)
            yield module_name(index, site), part.rows.size, part.cols.size


def _tensors(spec: ModelSpec, nf4: bool, random: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    hidden, vocab = spec.hidden_size, spec.vocab_size
    yield "model.embed_tokens.weight", _normal(random, 0.5, vocab, hidden)
    yield "lm_head.weight", _normal(random, 0.5, vocab, hidden)
    norms = [
        f"model.layers.{i}.{kind}_layernorm" for i in range(spec.num_layers) for kind in _NORMS
    ]
    for name in (*norms, "model.norm"):
        yield f"{name}.weight", torch.empty(hidden).uniform_(0.5, 1.5, generator=random)
    for name, rows, columns in _linears(spec, SITES):
        std = 1.5 * columns**-0.5
        if nf4:
            yield from _packed(f"{name}.weight", rows, columns, std, random)
        else:
            yield f"{name}.weight", _normal(random, std, rows, columns)


_NORMS = ("input", "post_attention")


def _packed(
    name: str, rows: int, columns: int, std: float, random: torch.Generator
) -> Iterator[tuple[str, Tensor]]:
    """A weight of random codes and random scales: any bytes are some weight."""
    count = rows * columns
    blocks, mean = -(-count // BLOCK), std / STD_OF_CODES

    def integers(size: int) -> Tensor:
        return torch.randint(256, (size,), dtype=torch.uint8, generator=random)

    state = {
        "quant_type": "nf4",
        "blocksize": BLOCK,
        "dtype": "float32",
        "shape": [rows, columns],
        "nested_blocksize": NESTED,
        "nested_dtype": "float32",
        "nested_offset": mean,
    }
    yield name, integers(-(-count // 2)).unsqueeze(1)
    yield f"{name}.absmax", integers(blocks)
    scales = torch.empty(-(-blocks // NESTED)).uniform_(0.2, 0.4, generator=random)
    yield f"{name}.nested_absmax", scales * mean
    yield f"{name}.nested_quant_map", torch.linspace(-1, 1, 256)
    yield f"{name}.quant_map", torch.tensor(NF4_CODE)
    text = json.dumps(state).encode()
    yield f"{name}.quant_state.bitsandbytes__nf4", torch.tensor(list(text), dtype=torch.uint8)


def _normal(random: torch.Generator, std: float, *shape: int) -> Tensor:
    return torch.empty(shape).normal_(std=std, generator=random)
