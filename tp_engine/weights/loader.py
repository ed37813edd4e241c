"""Loads one rank's weights; what is missing or left over in the checkpoint is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal

import torch
from torch import Tensor

from kernels import DenseWeight, Ops, Weight
from sharding import Checkpoint, LayerCut, RankCut, Span, WeightSlice, weight_slice
from tp_engine.models.spec import ModelSpec
from tp_engine.weights.dummy import DummyReader
from tp_engine.weights.reader import Member, TensorReader, WeightError
from tp_engine.weights.types import LayerWeights, RankWeights

__all__ = ["load_weights"]

EMBEDDING: Final = "model.embed_tokens.weight"
HEAD: Final = "lm_head.weight"
NORM: Final = "model.norm.weight"
QKV: Final = ("q_proj", "k_proj", "v_proj")
GATE_UP: Final = ("gate_proj", "up_proj")


def load_weights(
    spec: ModelSpec,
    directory: Path | str,
    cut: RankCut,
    *,
    dtype: torch.dtype,
    device: torch.device,
    quantize: Literal["nf4"] | None = None,
    load_format: Literal["safetensors", "dummy"] = "safetensors",
    ops: Ops | None = None,
) -> RankWeights:
    """Read the part of a checkpoint that a rank holds.

    Plain float32, float16 and bfloat16 tensors are cast to ``dtype``; bitsandbytes NF4 weights keep
    their bits. Peak memory is the shard and about one tensor.

    Args:
        quantize: ``nf4`` quantises the layers' linears that are stored plain, with the bits that
            bitsandbytes would give the whole weight; embedding and LM head stay as they are.
        load_format: ``dummy`` reads nothing and makes random weights of these shapes.
        ops: if given, weights are prepared for them, which may keep copies that are faster.

    Raises:
        CheckpointError: a file or a tensor is missing or corrupt.
        WeightError: a tensor is left over, of another shape or type, or not finite.
    """
    prepare = _preparation(ops, dtype)
    if load_format == "dummy":
        dummy = DummyReader(
            dtype=dtype,
            device=device,
            quantize=quantize == "nf4",
            prepare=prepare,
            seed=cut.rank,
        )
        return _Loader(spec, dummy).load(cut)
    with Checkpoint.open(directory) as checkpoint:
        reader = TensorReader(
            checkpoint,
            dtype=dtype,
            device=device,
            quantize=quantize == "nf4",
            prepare=prepare,
        )
        weights = _Loader(spec, reader).load(cut)
        _check_left_over(spec, checkpoint)
    return weights


def _preparation(ops: Ops | None, dtype: torch.dtype) -> Callable[[Weight], Weight]:
    return (lambda weight: weight) if ops is None else lambda weight: ops.prepare(weight, dtype)


def module_name(layer: int, site: str) -> str:
    """Full name of a layer's linear module."""
    block = "mlp" if site in (*GATE_UP, "down_proj") else "self_attn"
    return f"model.layers.{layer}.{block}.{site}"


class _Loader:
    """Which tensors make up which part of the model."""

    def __init__(self, spec: ModelSpec, reader: TensorReader | DummyReader) -> None:
        self._spec = spec
        self._dims = spec.dims()
        self._reader = reader

    def load(self, cut: RankCut) -> RankWeights:
        embedding = self._reader.dense(self._vocabulary(EMBEDDING, cut.vocab))
        return RankWeights(
            embedding=embedding,
            lm_head=self._head(embedding, cut.vocab),
            norm=self._norm(NORM, self._spec.hidden_size),
            layers=[self._layer(i, layer) for i, layer in enumerate(cut.layers)],
        )

    def _vocabulary(self, name: str, rows: Span) -> Member:
        shape = (self._spec.vocab_size, self._spec.hidden_size)
        return name, shape, WeightSlice(rows=rows, cols=Span(0, self._spec.hidden_size))

    def _head(self, embedding: Tensor, rows: Span) -> Weight:
        if self._spec.tie_word_embeddings:
            if self._reader.holds(HEAD) and not self._reader.same(EMBEDDING, HEAD, rows):
                raise WeightError(
                    f"{HEAD} differs from {EMBEDDING}, but tie_word_embeddings is true"
                )
            return self._reader.prepare(DenseWeight(weight=embedding))
        member = self._vocabulary(HEAD, rows)
        if self._reader.quantized(HEAD):
            return self._reader.linear([member])[0]
        return self._reader.prepare(DenseWeight(weight=self._reader.dense(member)))

    def _layer(self, index: int, cut: LayerCut) -> LayerWeights:
        prefix, spec = f"model.layers.{index}", self._spec
        heads = f"{prefix}.self_attn"
        return LayerWeights(
            qkv=self._linear(index, cut, *QKV),
            qkv_bias=self._bias(index, cut, *QKV) if spec.qkv_bias else None,
            o=self._linear(index, cut, "o_proj")[0],
            o_bias=self._bias(index, cut, "o_proj") if spec.o_bias else None,
            gate_up=self._linear(index, cut, *GATE_UP),
            gate_up_bias=self._bias(index, cut, *GATE_UP) if spec.mlp_bias else None,
            down=self._linear(index, cut, "down_proj")[0],
            down_bias=self._bias(index, cut, "down_proj") if spec.mlp_bias else None,
            input_norm=self._norm(f"{prefix}.input_layernorm.weight", spec.hidden_size),
            post_norm=self._norm(f"{prefix}.post_attention_layernorm.weight", spec.hidden_size),
            q_norm=self._norm(f"{heads}.q_norm.weight", spec.head_dim) if spec.qk_norm else None,
            k_norm=self._norm(f"{heads}.k_norm.weight", spec.head_dim) if spec.qk_norm else None,
        )

    def _linear(self, index: int, cut: LayerCut, *sites: str) -> tuple[Weight, ...]:
        members: list[Member] = []
        for site in sites:
            whole = _whole_shape(self._spec, site)
            part = weight_slice(self._dims, cut, site)
            members.append((f"{module_name(index, site)}.weight", whole, part))
        return self._reader.linear(members)

    def _bias(self, index: int, cut: LayerCut, *sites: str) -> Tensor:
        parts = []
        for site in sites:
            size = _whole_shape(self._spec, site)[0]
            rows = weight_slice(self._dims, cut, site).rows
            parts.append((f"{module_name(index, site)}.bias", size, rows))
        return self._reader.vector(*parts)

    def _norm(self, name: str, size: int) -> Tensor:
        return self._reader.vector((name, size, Span(0, size)))


def _whole_shape(spec: ModelSpec, site: str) -> tuple[int, int]:
    """[out, in] of a site's unsharded weight."""
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    match site:
        case "q_proj":
            return queries, spec.hidden_size
        case "k_proj" | "v_proj":
            return keys, spec.hidden_size
        case "o_proj":
            return spec.hidden_size, queries
        case "down_proj":
            return spec.hidden_size, spec.intermediate_size
    return spec.intermediate_size, spec.hidden_size


def _check_left_over(spec: ModelSpec, checkpoint: Checkpoint) -> None:
    """Every tensor must have been read, except buffers that older files keep and none uses."""
    harmless = {"model.rotary_emb.inv_freq"}
    for layer in range(spec.num_layers):
        harmless.add(f"model.layers.{layer}.self_attn.rotary_emb.inv_freq")
    left = [name for name in checkpoint.unread if name not in harmless]
    if left:
        shown = ", ".join(left[:5]) + (", ..." if len(left) > 5 else "")
        raise WeightError(
            f"{checkpoint.directory}: {len(left)} tensors that {spec.architecture} with this "
            f"configuration does not have: {shown}"
        )
