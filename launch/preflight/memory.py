"""Estimate of the memory of the heaviest rank, and the check that it is there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from launch.preflight.errors import PreflightError
from sharding import LayerCut, ModelDims, cut_model
from tp_engine.config import GIB

NF4_BYTES = 0.5 + 4 / 64
"""Bytes of an NF4 weight with its share of a float32 absmax, at 64 weights a block."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryNeed:
    """What the heaviest rank needs, in bytes."""

    weights: int
    """Weights as they are stored."""
    dense_copies: int
    """De-quantised or re-ordered copies kept beside them."""
    scratch: int
    """Activations and logits of the largest step, and one de-quantised module."""
    sequence: int
    """Keys and values of one sequence of max_model_len tokens: the least an arena must hold."""

    def total(self, arena_bytes: int | None) -> int:
        """Everything, with an arena of this size, or the least one."""
        return self.weights + self.dense_copies + self.scratch + (arena_bytes or self.sequence)


def estimate_memory(
    dims: ModelDims,
    world: int,
    *,
    element_bytes: int,
    nf4: bool,
    dense_copies: bool,
    tied: bool,
    max_model_len: int,
    max_num_batched_tokens: int,
    max_num_seqs: int,
) -> MemoryNeed:
    """What the heaviest of ``world`` ranks needs, to a few per cent.

    ``element_bytes`` is the size of an activation; ``nf4`` says whether the layers' weights are
    quantised, ``dense_copies`` whether copies of all that is multiplied stay beside them, ``tied``
    whether the LM head is the embedding.
    """
    cuts = cut_model(dims, world)
    linear = max(sum(sum(_modules(dims, layer)) for layer in cut.layers) for cut in cuts)
    vocab = max(cut.vocab.size for cut in cuts)
    tables = vocab * dims.hidden * (1 if tied else 2) * element_bytes
    mlp = max(width for cut in cuts for width in cut.mlp_widths)
    heads = max(count for cut in cuts for count in cut.q_heads)
    widest = max(size for cut in cuts for layer in cut.layers for size in _modules(dims, layer))
    row = 4 * dims.hidden + 3 * mlp + 4 * heads * dims.head_dim
    steps = max_num_batched_tokens * row * element_bytes + max_num_seqs * vocab * 4
    kv_heads = max(sum(cut.kv_heads) for cut in cuts)
    return MemoryNeed(
        weights=int(linear * (NF4_BYTES if nf4 else element_bytes)) + tables,
        dense_copies=(linear + vocab * dims.hidden) * element_bytes if dense_copies else 0,
        scratch=steps + (widest * element_bytes if nf4 and not dense_copies else 0),
        sequence=2 * kv_heads * dims.head_dim * element_bytes * max_model_len,
    )


def _modules(dims: ModelDims, layer: LayerCut) -> Iterator[int]:
    """Weights of a layer's fused modules on a rank: qkv, o, gate and up, down."""
    q, kv = layer.q_heads.size * dims.head_dim, layer.kv_heads.size * dims.head_dim
    yield dims.hidden * (q + 2 * kv)
    yield dims.hidden * q
    yield dims.hidden * 2 * layer.mlp.size
    yield dims.hidden * layer.mlp.size


def check_memory(
    need: MemoryNeed, available: int, *, arena_bytes: int | None, where: str, nf4: bool
) -> None:
    """Check that a rank's share of memory holds what it needs.

    ``available`` is that share in bytes, ``where`` names it (as in "GPU 0" or "this host, for each
    of 2 ranks"), ``nf4`` says whether the weights are quantised already.

    Raises:
        PreflightError: with each part, what there is, and the flags that change it.
    """
    total = need.total(arena_bytes)
    if total <= available:
        return
    arena = "arena (--arena-bytes)" if arena_bytes else "keys and values of one full sequence"
    parts = {
        "weights": need.weights,
        "copies for speed": need.dense_copies,
        "scratch of a step": need.scratch,
        arena: arena_bytes or need.sequence,
    }
    listed = ", ".join(f"{name} {_gib(size)}" for name, size in parts.items() if size)
    advice = [
        "" if nf4 else "--quantize nf4",
        "--no-keep-dense" if need.dense_copies else "",
        "a smaller --arena-bytes" if arena_bytes else "a smaller --max-model-len",
        "a smaller --max-num-batched-tokens",
        "more ranks",
    ]
    raise PreflightError(
        f"about {_gib(total)} needed, {_gib(available)} available on {where} ({listed}): try "
        f"{', '.join(filter(None, advice))}"
    )


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
