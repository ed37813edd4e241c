"""LoRA deltas on CPU with one shape of product for an adapter, whatever else is in the step.

Segments are cut into tiles of `ROWS` rows, padded; a product never mixes ranks, and the batch
dimension of a batched product doesn't change the order of a sum.
"""

from torch import Tensor

from kernels.checks import check_expand, check_lora, check_sites
from kernels.lora import LoraSegments
from kernels.lora.cpu import expand_, shrink, step_batches

ROWS = 8
_LANES = 16  # fewer columns than a vector holds would be summed in another order


def lora_shrink(
    x: Tensor,
    arena: Tensor,
    descriptors: Tensor,
    segments: LoraSegments,
    *,
    layer: int,
    sites: tuple[int, ...],
    num_sites: int,
) -> Tensor:
    """See `kernels.lora.LoraShrink`; a row's bits don't depend on T, its place, or other rows."""
    check_lora(x, "x", arena, descriptors, layer, num_sites)
    check_sites(sites, num_sites)
    batches = step_batches(segments, descriptors, ROWS)
    return shrink(x, arena, batches, segments, layer, sites, num_sites, _LANES)


def lora_expand_(
    y: Tensor,
    h: Tensor,
    arena: Tensor,
    descriptors: Tensor,
    segments: LoraSegments,
    *,
    layer: int,
    sites: tuple[int, ...],
    num_sites: int,
    spans: tuple[tuple[int, int], ...],
) -> None:
    """See `kernels.lora.LoraExpand`; a row's bits don't depend on T, its place, or other rows."""
    check_lora(y, "y", arena, descriptors, layer, num_sites)
    check_sites(sites, num_sites)
    check_expand(y, h, segments, sites, spans)
    batches = step_batches(segments, descriptors, ROWS)
    expand_(y, h, arena, batches, layer, sites, num_sites, spans, _LANES)


def lora_add_(
    y: Tensor,
    x: Tensor,
    arena: Tensor,
    descriptors: Tensor,
    segments: LoraSegments,
    *,
    layer: int,
    sites: tuple[int, ...],
    num_sites: int,
    spans: tuple[tuple[int, int], ...],
) -> None:
    """See `kernels.lora.LoraAdd`; a row's bits don't depend on T, its place, or other rows."""
    memory = (arena, descriptors, segments)
    h = lora_shrink(x, *memory, layer=layer, sites=sites, num_sites=num_sites)
    lora_expand_(y, h, *memory, layer=layer, sites=sites, num_sites=num_sites, spans=spans)


__all__ = ["lora_add_", "lora_expand_", "lora_shrink"]
