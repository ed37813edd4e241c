"""The tensors of one step, on the rank's device.

Legend: T rows, R rows whose logits are wanted, P pages.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kernels.attention import AttentionBatch
from kernels.lora import LoraBatch
from tp_engine.layers.token_rows import TokenRows

__all__ = ["EndRows", "StepInput"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EndRows:
    """The adapters of a step that change the embedding or the LM head."""

    embedding: tuple[tuple[slice, TokenRows], ...]
    """Of the T rows some, and what becomes of their embeddings."""
    head: tuple[tuple[slice, TokenRows], ...]
    """Of the R rows some, and what becomes of their logits."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepInput:
    """One forward pass. A step has at least one row."""

    tokens: Tensor
    """int64 [T], below the vocabulary size."""
    positions: Tensor
    """int64 [T], below the decoder's ``max_positions``."""
    attention: AttentionBatch
    """Which rows are which sequence's, and where keys and values lie."""
    logit_rows: Tensor | None
    """int64 [R], the rows whose logits are wanted; None: all, in order."""
    kv: tuple[tuple[Tensor, Tensor], ...]
    """Per layer the key and value cache [P, Hkv, block, D], as `kernels.attention` reads them."""
    lora: LoraBatch | None = None
    """None: no row has an adapter."""
    ends: EndRows | None = None
    """None: no row has an adapter that changes the embedding or the LM head."""
