"""The one launch of a LoRA delta compiles without a GPU, its operands read into place."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")


from kernels.lora.plans import plan_add
from kernels.lora.triton_add import add_kernel
from tests.kernels.compiled.build import build, resource_usage

POINTERS = {
    **{"p_x": "*bf16", "p_y": "*bf16", "p_arena": "*u8", "p_tiles": "*i32"},
    **{"p_descriptors": "*i64", "p_exchange": "*i64", "p_counter": "*i64"},
}
ALIGNED = {*POINTERS, "K", "stride_x", "stride_y", "room"}
OUTPUT_BYTES = 512
"""Shared memory that the 16 x 8 values of a part of h pass through on their way out."""

SPILLED = 128
"""Bytes; by the compiler's version, a few addresses are kept there."""


def compiled(
    rows: int,
    width: int,
    sites: int,
    capability: int,
    max_rank: int = 16,
    has_base: bool = True,
) -> tuple[Any, int]:
    """Return the kernel as launched for the plan of a step, and its registers."""
    plan = plan_add(rows, width, max_rank)
    constants = {
        "SITES": sites,
        "PARTS": plan.parts(width),
        "SHRINK_STEPS": plan.shrink_steps,
        "EXPAND_STEPS": plan.expand_steps,
        "BLOCK_K": plan.block_k,
        "EVEN_K": True,
        "BLOCKS": plan.blocks,
        "VECTOR": 16,
        "ITEM": torch.bfloat16.itemsize,
        "PRECISION": "halves",
        "ONE_ROW": rows == 1,
        "USE_TURNS": max_rank > 16,
        "HAS_BASE": has_base,
        "USE_PDL": capability >= 90,
    }
    options = {"num_warps": 1, "num_stages": 1, "maxnreg": plan.registers}
    built = build(add_kernel, constants, POINTERS, ALIGNED, capability, **options)
    return built, plan.registers


@pytest.mark.parametrize(("capability", "has_base"), [(80, True), (90, True), (90, False)])
@pytest.mark.parametrize(("rows", "width", "sites"), [(1, 4096, 3), (64, 4096, 2), (64, 14336, 1)])
def test_operands_go_from_memory_to_the_lanes_that_need_them(
    rows: int, width: int, sites: int, capability: int, has_base: bool, tmp_path: Path
) -> None:
    built, registers = compiled(rows, width, sites, capability, has_base=has_base)
    assert built.metadata.shared <= OUTPUT_BYTES
    ptx = built.asm["ptx"]
    assert "ldmatrix" not in ptx and "mma.sync" in ptx
    assert re.search(r"ld\.volatile\.global\.v2\.b64", ptx), "words of the exchange one by one"
    narrow = re.findall(r"ld\.global[.\w]*\.b16", ptx)
    assert not narrow, "rows or rank-rows element by element"
    usage = resource_usage(built, tmp_path)
    ((used, stack),) = re.findall(r"REG:(\d+) STACK:(\d+)", usage)
    assert int(used) <= registers and int(stack) <= SPILLED, usage


def test_larger_ranks_move_nothing_either() -> None:
    built, _ = compiled(64, 4096, 2, 90, max_rank=64)
    assert built.metadata.shared <= OUTPUT_BYTES and "ldmatrix" not in built.asm["ptx"]


def test_adapters_are_read_before_the_wait_and_rows_after_it() -> None:
    ptx = compiled(64, 4096, 1, 90)[0].asm["ptx"]
    waits = [found.start() for found in re.finditer(r"griddepcontrol\.wait", ptx)]
    assert len(waits) == 4  # of the two kinds of programs, with and without work
    overlapped = 0
    for last, wait in zip((0, *waits), waits, strict=False):
        before = ptx[max(last, ptx.rfind("st.global", 0, wait)) : wait]
        after = ptx[wait : ptx.find("st.global", wait)]
        overlapped += ".v4.b32" in before and ".v4.b32" in after
    assert overlapped == 2, "rank-rows should be on their way while it waits, rows read afterwards"
    assert ptx.index("st.global") > waits[0]
