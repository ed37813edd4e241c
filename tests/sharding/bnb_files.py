"""Weights as bitsandbytes quantises and stores them, and what it reads back."""

import json
import logging
import warnings
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

# bitsandbytes looks for a distribution called `kernels` and meets this repository's package.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import bitsandbytes.functional as bnb

from sharding import ExpandedNF4  # noqa: E402 (after the quiet imports)

NAME = "model.layers.0.mlp.down_proj.weight"
STATE = f"{NAME}.quant_state.bitsandbytes__nf4"


def quantize(
    weight: torch.Tensor,
    *,
    blocksize: int = 64,
    double_quant: bool = True,
    storage: torch.dtype = torch.uint8,
) -> tuple[torch.Tensor, Any]:
    """Packed codes and quantisation state of bitsandbytes."""
    packed, state = bnb.quantize_4bit(
        weight,
        blocksize=blocksize,
        compress_statistics=double_quant,
        quant_type="nf4",
        quant_storage=storage,
    )
    return packed, state


def tensors_of(packed: torch.Tensor, state: Any) -> dict[str, torch.Tensor]:
    """What transformers stores for the weight called `NAME`."""
    parts = state.as_dict(packed=True)
    return {NAME: packed, **{f"{NAME}.{key}": value for key, value in parts.items()}}


def save(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """Write a checkpoint directory."""
    path.mkdir(exist_ok=True)
    safetensors.torch.save_file(tensors, path / "model.safetensors")
    return path


def edit_state(tensors: dict[str, torch.Tensor], **changes: Any) -> None:
    """Change keys of the JSON; None removes a key."""
    state = json.loads(bytes(tensors[STATE].tolist())) | changes
    kept = {key: value for key, value in state.items() if value is not None}
    tensors[STATE] = torch.tensor(list(json.dumps(kept).encode()), dtype=torch.uint8)


def truth(packed: torch.Tensor, state: Any) -> ExpandedNF4:
    """Codes and scales of each element, by bitsandbytes' own expansion of the scales."""
    shape = tuple(state.shape)
    flat = packed.flatten().view(torch.uint8)
    codes = torch.stack((flat >> 4, flat & 15), dim=-1).flatten()[: state.shape.numel()]
    absmax = state.absmax
    if state.nested:
        absmax = bnb.dequantize_blockwise(absmax, state.state2) + state.offset
    scales = absmax.repeat_interleave(state.blocksize)[: state.shape.numel()]
    return ExpandedNF4(codes=codes.view(shape), absmax=scales.view(shape))
