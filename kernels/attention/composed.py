"""Ops out of their single steps, for backends that gain nothing from one launch."""

from torch import Tensor

from kernels.attention import (
    AttentionBatch,
    HeadDeltas,
    HeadNorms,
    PagedAttention,
    RotateAttend,
    RotateStore,
    StoreKV,
)
from kernels.fused import RMSNorm, Rotary
from kernels.fused.delta import with_delta


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
        deltas: HeadDeltas | None = None,
    ) -> Tensor:
        """See `kernels.attention.RotateStore`."""
        if deltas is not None:
            q, k, v = map(with_delta, (q, k, v), deltas)
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
        deltas: HeadDeltas | None = None,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """See `kernels.attention.RotateAttend`."""
        places = (k_cache, v_cache, cos_sin, positions, batch)
        q = rotate_store(q, k, v, *places, norms=norms, deltas=deltas)
        return paged_attention(q, k_cache, v_cache, batch, scale=scale, window=window)

    return rotate_attend


__all__ = ["compose_rotate_attend", "compose_rotate_store"]
