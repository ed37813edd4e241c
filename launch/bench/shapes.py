"""Models by their shapes alone: configurations without weights, and random adapters."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from sharding import SITES, ModelDims
from tp_engine.adapters import AdapterRevision, LoraModule, pack_adapter
from tp_engine.engine import Engine
from tp_engine.rank import Rank

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "llama-3.1-70b": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "tiny": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 1000,
    },
}
"""Sizes by name; all are Llama decoders."""


def write_config(directory: Path, name: str) -> Path:
    """A model directory that holds a configuration only, for ``load_format="dummy"``."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        **SHAPES[name],
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def random_revision(dims: ModelDims, rank: int, seed: int) -> AdapterRevision:
    """An adapter of one LoRA rank on all seven linears, bfloat16, with small random values."""
    widths = {
        "q_proj": (dims.hidden, dims.heads * dims.head_dim),
        "k_proj": (dims.hidden, dims.kv_heads * dims.head_dim),
        "v_proj": (dims.hidden, dims.kv_heads * dims.head_dim),
        "o_proj": (dims.heads * dims.head_dim, dims.hidden),
        "gate_proj": (dims.hidden, dims.intermediate),
        "up_proj": (dims.hidden, dims.intermediate),
        "down_proj": (dims.intermediate, dims.hidden),
    }
    random = torch.Generator().manual_seed(seed)

    def tensor(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16).uniform_(-0.02, 0.02, generator=random)

    modules = {
        (layer, site): LoraModule(
            a=tensor(rank, widths[name][0]), b=tensor(widths[name][1], rank), scale=2.0
        )
        for layer in range(dims.layers)
        for site, name in enumerate(SITES)
    }
    digest = hashlib.sha256(f"{rank} {seed}".encode()).hexdigest()
    return AdapterRevision(digest=digest, source="random", modules=modules, expected=len(modules))


def register_copies(rank: Rank, engine: Engine, revision: AdapterRevision, count: int) -> list[str]:
    """Register one revision ``count`` times as if they were different; their digests.

    Packing takes longer than anything that is measured, and kernels do not look at values.
    """
    dtype = getattr(torch, rank.config.dtype)
    images = pack_adapter(revision, rank.cuts, rank.dims, dtype, rank.layout.page_bytes)
    # Those that the hosts have no room for are read again as if from a store.
    engine.tiers.fetcher.fetch = lambda digest: images
    digests = []
    for i in range(count):
        digest = hashlib.sha256(f"{revision.digest} {i}".encode()).hexdigest()
        engine.roster.register(f"adapter-{i}", dataclasses.replace(revision, digest=digest), images)
        digests.append(digest)
    return digests
