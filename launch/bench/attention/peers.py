"""torch's variable-length attention over pages, where this torch has it."""

from __future__ import annotations

import importlib.util
import inspect
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels import AttentionBatch
from launch.bench.attention.memory import DIM, Paged
from launch.bench.graphs import Call


def varlen_calls(memory: Paged, q: Tensor) -> list[Call]:
    """A call a place, over the same pages; calls raise where this torch can't do it."""
    return [partial(_varlen, q, *place) for place in memory.places()]


def _varlen(q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch) -> object:
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        raise NotImplementedError(f"torch {torch.__version__} has no varlen_attn")
    varlen: Any = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    known = inspect.signature(varlen).parameters
    if "block_table" not in known:
        raise NotImplementedError(f"varlen_attn of torch {torch.__version__} takes no block_table")
    groups = {"enable_gqa": True} if "enable_gqa" in known else {}
    return varlen(
        q,
        k.transpose(1, 2),  # [pages, block, KV heads, D], as strided as it is
        v.transpose(1, 2),
        batch.query_offsets,
        None,
        batch.max_query,
        batch.page_table.shape[1] * k.shape[2],
        scale=DIM**-0.5,
        window_size=(-1, 0),
        seqused_k=batch.context_lens,
        block_table=batch.page_table,
        **groups,
    )
