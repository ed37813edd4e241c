"""LoRA deltas of few rows on CUDA: one launch for up to three sites of a projection.

Nothing is read back from the device, and the grid depends on shapes, the room for tiles and
`max_rank` alone: a launch can be captured into a CUDA graph, whose steps may then have fewer
tiles, and any ranks and rows within these bounds.

A launch overlaps with the one before it (programmatic dependent launch) and reads tiles, records
and adapters early: what writes those must not be the very last launch before it. Launches share
memory, so that a device must not run two at a time.
"""

import torch
import triton
from torch import Tensor

from kernels.checks import (
    check_dtype,
    check_lined,
    check_lora_input,
    check_lora_output,
    reject,
)
from kernels.lora import LoraBatch, LoraTarget
from kernels.lora.launches import (
    PRECISION,
    launch_options,
    launches,
    padded,
    unit_spans,
)
from kernels.lora.plans import AddPlan, plan_add
from kernels.lora.triton_add import add_kernel
from kernels.lora.triton_lanes import RANKS
from kernels.sizes import lined

COUNTER_WORDS = 16
_EXCHANGES: dict[tuple[torch.device, int], Tensor] = {}


def add_(
    y: Tensor,
    x: Tensor,
    batch: LoraBatch,
    target: LoraTarget,
    *,
    plan: AddPlan | None = None,
    has_base: bool = True,
) -> None:
    """See `kernels.lora.LoraAdd`; the segments' tiles must be known, and y's rows contiguous.

    Without `has_base`, what y holds is not read: the delta itself is written in the columns of the
    target, -0.0 where there is none, which changes nothing that it is added to. Such a launch,
    being in a branch, begins when all before it have ended.
    """
    check_lora_input(x)
    check_lora_output(y, target)
    check_dtype("x", x)
    rows, width = x.shape
    if y.dtype != x.dtype or y.shape[0] != rows:
        reject("y", f"{x.dtype} [{rows}, N]", y)
    check_dtype("y", y)
    check_lined("y", y)
    if not (rows and batch.segments.max_rank):
        return
    x = lined(x)
    plan = plan or plan_add(rows, width, batch.segments.max_rank)
    for _, launch in launches(target):
        if any(size for _, size in launch.spans):
            _launch(y, x, batch, launch, plan, has_base)


def _launch(
    y: Tensor, x: Tensor, batch: LoraBatch, launch: LoraTarget, plan: AddPlan, has_base: bool
) -> None:
    """Launch once, for up to three sites."""
    tiles, max_rank, (rows, width) = batch.segments.tiles, batch.segments.max_rank, x.shape
    assert tiles is not None
    sites, capacity, parts = len(launch.sites), len(tiles), plan.parts(width)
    vector, spans = unit_spans(launch)
    room = RANKS.value * triton.cdiv(max_rank, RANKS.value)
    shrinks = min(plan.programs, capacity * sites * parts)
    blocks = sum(triton.cdiv(size, plan.columns) for _, size in launch.spans)
    exchange = exchange_memory(x.device, sites * rows * parts * room)
    add_kernel[(shrinks + min(plan.programs, capacity * blocks),)](
        x,
        y,
        batch.arena,
        tiles,
        batch.descriptors,
        exchange[COUNTER_WORDS:],
        exchange,
        capacity,
        rows,
        shrinks,
        max_rank,
        room,
        width,
        x.stride(0),
        y.stride(0),
        *padded(launch.heads),
        *spans,
        SITES=sites,
        PARTS=parts,
        SHRINK_STEPS=plan.shrink_steps,
        EXPAND_STEPS=plan.expand_steps,
        BLOCK_K=plan.block_k,
        EVEN_K=width == parts * plan.block_k * plan.shrink_steps,
        BLOCKS=plan.blocks,
        VECTOR=vector,
        ITEM=x.element_size(),
        PRECISION=PRECISION[x.dtype],
        ONE_ROW=rows == 1,
        USE_TURNS=max_rank > RANKS.value,
        HAS_BASE=has_base,
        num_stages=1,
        maxnreg=plan.registers,
        **launch_options(x.device, 1, overlap=has_base),
    )


def exchange_memory(device: torch.device, words: int) -> Tensor:
    """Return int64 [COUNTER_WORDS + words or more]: the counter of launches, then their exchange.

    It begins as zeros and keeps what launches leave, so it is allocated once for each power of two
    and never in a capture, whose memory has no content before a replay.
    """
    size = 1 << max(12, (words - 1).bit_length())
    memory = _EXCHANGES.get((device, size))
    if memory is None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("a LoRA step must run once before one of its size is captured")
        memory = torch.zeros(COUNTER_WORDS + size, dtype=torch.int64, device=device)
        _EXCHANGES[device, size] = memory
    return memory


def lora_renew(device: torch.device) -> None:
    """See `kernels.lora.LoraRenew`: no launch has the number 0."""
    for (of, _), memory in _EXCHANGES.items():
        if of == device:
            memory[COUNTER_WORDS:].zero_()


__all__ = ["COUNTER_WORDS", "add_", "exchange_memory", "lora_renew"]
