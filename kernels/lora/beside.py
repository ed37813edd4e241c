"""LoRA deltas of few rows on CUDA, made beside the base product in a branch of a captured step."""

from collections.abc import Callable

from torch import Tensor

from kernels.lora import LoraBatch, LoraTarget, decode
from kernels.lora.triton_lanes import RANKS
from kernels.overlap import run_beside

FORKED_ROWS = 64
"""Most rows of a step that does so. With more, a fork delays the base product by as much as it
hides."""


def lora_beside(
    base: Callable[[], Tensor], x: Tensor, batch: LoraBatch, target: LoraTarget
) -> tuple[Tensor, Tensor] | None:
    """See `kernels.lora.LoraBeside`; for steps of up to `FORKED_ROWS` whose tiles are known."""
    rows, segments = x.shape[0], batch.segments
    if target.columns != sum(width for _, width in target.spans):
        raise ValueError(f"spans must lie side by side from column 0, got {target.spans}")
    if segments.tiles is None or not segments.max_rank or not 0 < rows <= FORKED_ROWS:
        return None
    delta = x.new_empty((rows, target.columns))

    def branch() -> None:
        decode.add_(delta, x, batch, target, has_base=False)

    # Products of several sites leave multiprocessors idle, or run long enough, for small ranks.
    base_first = len(target.sites) > 1 and segments.max_rank <= RANKS.value
    return run_beside(branch, base, x.device, work_first=base_first), delta


__all__ = ["lora_beside"]
