"""LoRA deltas of few rows on CUDA, made beside the base product or before it.

What reads the projection adds the delta. So the launch needs nothing of the base product: of few
rows, it runs in a branch of the captured step; of more, between what makes x and the base product,
beginning while the former ends.
"""

from collections.abc import Callable

from torch import Tensor

from kernels.lora import LoraSegments, decode
from kernels.lora.plans import MANY_ROWS
from kernels.lora.triton_lanes import RANKS
from kernels.overlap import run_beside

FORKED_ROWS = 64
"""Most rows of a step that makes its deltas in a branch. With more, a fork delays the base product
by as much as it hides."""


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
    delta, is_forked = x.new_empty((rows, columns)), rows <= FORKED_ROWS

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
            overlap=not is_forked,
        )

    if not is_forked:
        branch()
        return base(), delta
    # Products of several sites leave multiprocessors idle, or run long enough, for small ranks.
    base_first = len(sites) > 1 and segments.max_rank <= RANKS.value
    return run_beside(branch, base, x.device, work_first=base_first), delta


__all__ = ["lora_beside"]
