"""Ops out of their single steps, for backends that gain nothing from one launch."""

from torch import Tensor

from kernels.attention import (
    AttentionBatch,
    HeadNorms,
    PagedAttention,
    RotateAttend,
    RotateStore,
    StoreKV,
)
from kernels.fused import RMSNorm, Rotary


def compose_rotate_store(rms_norm: RMSNorm, rotary: Rotary, store_kv: StoreKV) -> RotateStore:
    """Return an op that runs the given ones one after the other."""

    def rotate_store(
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
        """See `kernels.attention.RotateStore`."""
        if norms is not None:
            q, k = rms_norm(q, norms.q, norms.eps), rms_norm(k, norms.k, norms.eps)
        q, k = rotary(q, k, cos_sin, positions)
        store_kv(k, v, k_cache, v_cache, batch)
        return q

    return rotate_store


def compose_rotate_attend(
    rotate_store: RotateStore, paged_attention: PagedAttention
) -> RotateAttend:
    """Return an op that runs the given ones one after the other."""

    def rotate_attend(
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
        """See `kernels.attention.RotateAttend`."""
        q = rotate_store(q, k, v, k_cache, v_cache, cos_sin, positions, batch, norms=norms)
        return paged_attention(q, k_cache, v_cache, batch, scale=scale, window=window)

    return rotate_attend


__all__ = ["compose_rotate_attend", "compose_rotate_store"]
