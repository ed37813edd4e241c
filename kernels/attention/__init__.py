"""Attention over KV blocks that lie in the arena's pages.

Legend: T rows of a step, B sequences, Hq / Hkv local query and KV heads, D head size, P pages of
the arena, Pmax pages a sequence at most, block tokens a page.

`k_cache` and `v_cache` are views [P, Hkv, block, D] of one layer: the page stride is the arena's,
head, token and dim are contiguous. Page ids are int32, offsets are computed in int64.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AttentionBatch:
    """Where the keys and values of a step's sequences lie. A new one is made for every step.

    On CUDA a captured step may be padded: with sequences of one row and no context, with sequences
    without rows, and with rows behind those of all sequences; K and V of such rows go to a negative
    page. Nothing is stored for them, and what attention returns is not fixed.

    Raises ValueError, naming the field, on a wrong shape or dtype.
    """

    query_offsets: Tensor
    """int32 [B + 1], ascending from 0 to T: sequence b has rows query_offsets[b] .. [b + 1]."""
    context_lens: Tensor
    """int32 [B], keys of each sequence once this step's tokens are stored."""
    page_table: Tensor
    """int32 [B, Pmax], pages of each sequence in order; unused places are 0."""
    write_pages: Tensor
    """int32 [T], the page that takes the K and V of each row; negative in padding."""
    write_slots: Tensor
    """int32 [T], the place in that page."""
    max_query: int
    """The largest number of rows of one sequence, or a bound of it."""
    max_context: int
    """The largest of context_lens, or a bound of it: a captured graph serves shorter ones too."""
    decodes: int = 0
    """The first so many sequences have one row each, in a captured step at most one: they take a
    faster way in a mixed step. 0 is always right."""
    memo: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)
    """What a backend derived on the host from this batch, shared by all layers of the step."""

    @property
    def singles(self) -> int:
        """The first so many sequences have at most one row: as `decodes`, or all."""
        return self.context_lens.shape[0] if self.max_query <= 1 else self.decodes

    def __post_init__(self) -> None:
        for name, ndim in _RANKS.items():
            tensor: Tensor = getattr(self, name)
            lined = ndim == 2 or tensor.is_contiguous()
            if tensor.dtype != torch.int32 or tensor.ndim != ndim or not lined:
                raise ValueError(
                    f"{name} must be int32 of rank {ndim}, of rank 1 contiguous, got "
                    f"{tensor.dtype} {tuple(tensor.shape)} of strides {tensor.stride()}"
                )
        batch = self.context_lens.shape[0]
        if self.query_offsets.shape[0] != batch + 1 or self.page_table.shape[0] != batch:
            raise ValueError(
                f"query_offsets must be [{batch + 1}] and page_table [{batch}, Pmax] beside "
                f"context_lens [{batch}], got {tuple(self.query_offsets.shape)} and "
                f"{tuple(self.page_table.shape)}"
            )
        if not 0 <= self.decodes <= batch:
            raise ValueError(f"decodes must be in 0 .. {batch}, got {self.decodes}")
        if self.write_pages.shape != self.write_slots.shape:
            raise ValueError(
                f"write_slots must be {tuple(self.write_pages.shape)} as write_pages, got "
                f"{tuple(self.write_slots.shape)}"
            )


_RANKS = {
    "query_offsets": 1,
    "context_lens": 1,
    "page_table": 2,
    "write_pages": 1,
    "write_slots": 1,
}


class StoreKV(Protocol):
    """The write half of attention."""

    def __call__(
        self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch
    ) -> None:
        """Put this step's keys and values into their pages.

        Semantics: k_cache[write_pages[t], :, write_slots[t]] = k[t] where write_pages[t] >= 0; v
        likewise.

        k, v [T, Hkv, D] in the caches' dtype; k_cache, v_cache [P, Hkv, block, D], written in
        place, nothing but the named places. Raises ValueError, naming the argument, on a wrong
        shape, dtype or stride.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HeadNorms:
    """Root-mean-square norms of single heads, as Qwen3 has them before the rotation."""

    q: Tensor
    """[D], weight for query heads."""
    k: Tensor
    """[D], weight for key heads."""
    eps: float


class RotateStore(Protocol):
    """All that happens to the heads between their projection and attention."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        cos_sin: Tensor,
        positions: Tensor,
        batch: AttentionBatch,
        *,
        norms: HeadNorms | None,
    ) -> Tensor:
        """Normalise and rotate queries and keys, put keys and values into their pages.

        Semantics: with norms, q = rms_norm(q, norms.q, eps) and k likewise; q, k = rotary(q, k,
        cos_sin, positions); store_kv(k, v, k_cache, v_cache, batch). Rounded as in these steps.

        Arguments as in `kernels.fused.Rotary` and `StoreKV`; q, k and v may be views of one
        projection and are not written. Returns a new [T, Hq, D]. Raises ValueError as those.
        """
        ...


class PagedAttention(Protocol):
    """The read half of attention."""

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: AttentionBatch,
        *,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """Causal attention of each row over its own sequence.

        Semantics: row i of sequence b has position p = context_lens[b] - rows(b) + i and sees keys
        max(0, p - window + 1) .. p; out = softmax(scale * q . K) V in float32, rounded once. Query
        head h reads KV head h // (Hq / Hkv).

        q [T, Hq, D]; caches [P, Hkv, block, D] that already hold this step's tokens; window >= 1 or
        None; returns a new [T, Hq, D]. Hq may be 0. Memory outside the context, also in the tail
        of a sequence's last page, may hold anything, NaN included, and never reaches the result.
        Raises ValueError, naming the argument, on a wrong shape, dtype or stride.
        """
        ...


class RotateAttend(Protocol):
    """A whole attention block between its projections."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        cos_sin: Tensor,
        positions: Tensor,
        batch: AttentionBatch,
        *,
        norms: HeadNorms | None,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """Store the rows' keys and values and attend.

        Semantics: q = rotate_store(q, k, v, ...); out = paged_attention(q, ...), with the rounding
        of these steps up to the order of sums.

        Arguments and errors as of `RotateStore` and `PagedAttention`; returns a new [T, Hq, D].
        """
        ...


__all__ = [
    "AttentionBatch",
    "HeadNorms",
    "PagedAttention",
    "RotateAttend",
    "RotateStore",
    "StoreKV",
]
