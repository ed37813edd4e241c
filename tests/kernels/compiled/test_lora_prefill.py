"""The LoRA kernels for many rows compile without a GPU; on Hopper y never changes lanes."""

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")


from kernels.lora.triton_prefill_expand import prefill_expand_kernel
from kernels.lora.triton_prefill_shrink import prefill_shrink_kernel
from kernels.lora.triton_prefill_silu import prefill_silu_kernel
from tests.kernels.compiled.build import assert_nothing_spilled, build

POINTERS = {
    **{"p_x": "*bf16", "p_y": "*bf16", "p_out": "*bf16", "p_h": "*fp32", "p_down": "*fp32"},
    **{"p_arena": "*u8", "p_descriptors": "*i64", "p_offsets": "*i32", "p_numbers": "*i64"},
}
ALIGNED = {
    *(*POINTERS, "K", "width", "max_rank", "stride_x", "stride_y", "stride_part", "stride_down"),
}
SHARED: dict[str, Any] = {"BLOCK_SEGMENTS": 64, "BLOCK_ROWS": 64, "ITEM": 2, "EVEN": True}
TILES = {**SHARED, "PARTS": 2, "BLOCK_RANKS": 16, "PRECISION": "halves", "WARPS": 4}
TILES |= {"CHUNK": 1024}
EXPAND = {**TILES, "SITES": 3, "BLOCK_N": 128, "STAGES": 3, "VECTOR": 16, "USE_TURNS": False}
SILU = {**TILES, "BLOCK_N": 64, "STAGES": 3}
SHRINK = {**SHARED, "SITES": 3, "BLOCK_RANKS": 64, "BLOCK_K": 64, "STAGES": 6}
TURNS = {**EXPAND, "BLOCK_N": 64, "USE_TURNS": True, "STAGES": 1}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "shrink": (prefill_shrink_kernel, SHRINK),
    "shrink of one site": (
        prefill_shrink_kernel,
        {**SHRINK, "SITES": 1, "BLOCK_RANKS": 16, "BLOCK_K": 128, "STAGES": 4},
    ),
    "expand": (prefill_expand_kernel, EXPAND),
    "expand of fewer rows": (prefill_expand_kernel, {**EXPAND, "STAGES": 1}),
    "expand of ranks up to 64": (prefill_expand_kernel, {**EXPAND, "BLOCK_RANKS": 64}),
    "expand of higher ranks": (prefill_expand_kernel, TURNS),
    "expand of odd widths": (prefill_expand_kernel, {**EXPAND, "VECTOR": 1, "EVEN": False}),
    "activation": (prefill_silu_kernel, SILU),
    "activation of ranks up to 64": (
        prefill_silu_kernel,
        {**SILU, "BLOCK_RANKS": 64, "BLOCK_N": 32},
    ),
}


def compiled(case: str, capability: int) -> Any:
    kernel, constants = CASES[case]
    constants = {**constants, "USE_PDL": capability >= 90}
    return build(kernel, constants, POINTERS, ALIGNED, capability, num_warps=4, num_stages=1)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("case", CASES)
def test_compiles_without_spills(case: str, capability: int, tmp_path: Path) -> None:
    built = compiled(case, capability)
    ptx = built.asm["ptx"]
    assert ("griddepcontrol.wait" in ptx) == (capability >= 90)
    assert ("wgmma" if capability >= 90 else "mma.sync") in ptx
    assert_nothing_spilled(built, tmp_path)


@pytest.mark.parametrize(
    ("case", "words", "operands"), [("expand", 8, 1), ("activation", 4, 3)], ids=["expand", "silu"]
)
def test_y_goes_from_memory_to_the_lanes_of_its_delta(case: str, words: int, operands: int) -> None:
    """16 bytes a lane both ways; within a step only rank-rows pass through shared memory again."""
    built = compiled(case, 90)
    ptx = built.asm["ptx"]
    loop = ptx[ptx.index("wgmma.mma") :]
    assert len(re.findall(r"st\.global[.\w]*\.v4\.b32", loop)) == words
    assert len(re.findall(r"cp\.async\.cg", ptx)) >= 2 * words
    start = [m.start() for m in re.finditer("scf.for", built.asm["ttgir"])][-1]
    step = built.asm["ttgir"][start:].split("scf.yield")[0]
    assert step.count("ttg.local_alloc") == operands
