"""The tensors that a rank holds.

Legend: H hidden size, D head size, q k v i the local widths of query, key, value heads and MLP,
V local vocabulary rows. Local sizes may be 0.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kernels.nf4 import Weight

__all__ = ["LayerWeights", "RankWeights"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LayerWeights:
    """One decoder layer. Plain tensors are in the compute dtype."""

    qkv: tuple[Weight, ...]
    """One weight [q + k + v, H]; or three, where a checkpoint quantises only some of them."""
    qkv_bias: Tensor | None
    """[q + k + v]."""
    o: Weight
    """[H, q]."""
    o_bias: Tensor | None
    """[H], whole on every rank."""
    gate_up: tuple[Weight, ...]
    """One weight [2 i, H], gate rows first; or two."""
    gate_up_bias: Tensor | None
    """[2 i]."""
    down: Weight
    """[H, i]."""
    down_bias: Tensor | None
    """[H], whole on every rank."""
    input_norm: Tensor
    """[H]."""
    post_norm: Tensor
    """[H]."""
    q_norm: Tensor | None
    """[D]."""
    k_norm: Tensor | None
    """[D]."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RankWeights:
    """The whole shard."""

    embedding: Tensor
    """[V, H] in the compute dtype."""
    lm_head: Weight
    """[V, H]; holds the embedding's own memory when the two are tied."""
    norm: Tensor
    """[H], the last norm."""
    layers: list[LayerWeights]
    """In order."""
