"""Tensor-parallel layers: each is its local sizes plus its shard rule."""

from tp_engine.layers.attention import Attention
from tp_engine.layers.linear import ColumnParallel, RowParallel
from tp_engine.layers.lora import LoraSites, Projected, has_deltas
from tp_engine.layers.mlp import MLP
from tp_engine.layers.norm import sum_add_norm
from tp_engine.layers.step import EndRows, StepInput
from tp_engine.layers.token_rows import ArenaMatrix, TokenRows, slabs_of
from tp_engine.layers.vocab import LMHead, VocabEmbedding

__all__ = [
    "MLP",
    "ArenaMatrix",
    "Attention",
    "ColumnParallel",
    "EndRows",
    "LMHead",
    "LoraSites",
    "Projected",
    "RowParallel",
    "StepInput",
    "TokenRows",
    "VocabEmbedding",
    "has_deltas",
    "slabs_of",
    "sum_add_norm",
]
