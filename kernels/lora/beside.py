"""LoRA deltas of few rows on CUDA, made beside the base product in a branch of a captured step."""

from collections.abc import Callable

from torch import Tensor

from kernels.lora import LoraSegments, decode
from kernels.lora.triton_lanes import RANKS
from kernels.overlap import run_beside

FORKED_ROWS = 64
"""Most rows of a step that does so. With more, a fork delays the base product by as much as it
hides."""


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
    """See `kernels.lora.LoraBeside`; for steps of up to `FORKED_ROWS` whose tiles are known."""
    rows, columns = x.shape[0], sum(width for _, width in spans)
    if columns != max((start + width for start, width in spans), default=0):
        raise ValueError(f"spans must lie side by side from column 0, got {spans}")
    if segments.tiles is None or not segments.max_rank or not 0 < rows <= FORKED_ROWS:
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

    # Products of several sites leave multiprocessors idle, or run long enough, for small ranks.
    base_first = len(sites) > 1 and segments.max_rank <= RANKS.value
    return run_beside(branch, base, x.device, work_first=base_first), delta


__all__ = ["lora_beside"]
