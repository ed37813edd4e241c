"""LoRA deltas of few rows on CUDA, made while the base product runs.

A base product of few rows waits for memory most of its time, and a delta for one dependent read
after the other: side by side they take little longer than the product. What reads the projection
adds the delta.
"""

from collections.abc import Callable

from torch import Tensor

from kernels.lora import LoraSegments, decode
from kernels.lora.plans import MANY_ROWS
from kernels.overlap import run_beside


def lora_beside(
    base: Callable[[], Tensor],
    x: Tensor,
    arena: Tensor,
    descriptors: Tensor,
    segments: LoraSegments,
    *,
    layer: int,
    sites: tuple[int, ...],
    num_sites: int,
    spans: tuple[tuple[int, int], ...],
) -> tuple[Tensor, Tensor] | None:
    """See `kernels.lora.LoraBeside`; of steps of fewer than `MANY_ROWS` whose tiles are known."""
    rows, columns = x.shape[0], sum(width for _, width in spans)
    if columns != max((start + width for start, width in spans), default=0):
        raise ValueError(f"spans must lie side by side from column 0, got {spans}")
    if segments.tiles is None or not segments.max_rank or not 0 < rows < MANY_ROWS:
        return None
    delta = x.new_empty((rows, columns))

    def branch() -> None:
        decode.add_(
            delta,
            x,
            arena,
            descriptors,
            segments,
            layer=layer,
            sites=sites,
            num_sites=num_sites,
            spans=spans,
            has_base=False,
        )

    return run_beside(branch, base, x.device), delta


__all__ = ["lora_beside"]
