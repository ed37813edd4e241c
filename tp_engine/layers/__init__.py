"""Tensor-parallel layers: each is its local sizes plus its shard rule."""

from tp_engine.layers.attention import Attention
from tp_engine.layers.linear import ColumnParallel, RowParallel
from tp_engine.layers.lora import LoraSites, has_deltas
from tp_engine.layers.mlp import MLP
from tp_engine.layers.norm import sum_add_norm
from tp_engine.layers.step import LoraBatch, StepInput
from tp_engine.layers.vocab import LMHead, VocabEmbedding

__all__ = [
    "MLP",
    "Attention",
    "ColumnParallel",
    "LMHead",
    "LoraBatch",
    "LoraSites",
    "RowParallel",
    "StepInput",
    "VocabEmbedding",
    "has_deltas",
    "sum_add_norm",
]
