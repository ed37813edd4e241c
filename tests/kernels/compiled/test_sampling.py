"""The kernels at both ends of a step compile for Ampere and Hopper without a GPU."""

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")


from kernels.entry.gpu_kernels import embed_kernel, spell_out_kernel
from kernels.sampling.best_kernel import best_kernel
from kernels.sampling.draw_kernel import draw_kernel, weigh_kernel
from kernels.sampling.penalise_kernel import penalise_kernel
from kernels.sampling.top_kernel import log_total_kernel, top_kernel
from tests.kernels.compiled.build import assert_nothing_spilled, build

LONGS = "positions row_slots slots last tokens tokens_out partial rows top_k sums list found"
POINTERS = {
    **{f"p_{name}": "*i64" for name in LONGS.split()},
    **{f"p_{name}": "*i32" for name in ("tables", "write_pages", "write_slots", "page_table")},
    **{f"p_{name}": "*fp64" for name in ("temperature", "top_p", "min_p", "uniform")},
    **{"p_logits": "*bf16", "p_weight": "*bf16", "p_top": "*fp32", "p_arrived": "*i32"},
    **{"p_out": "*i64", "p_seen": "*u8", "p_counts": "*i32", "p_factors": "*fp32"},
}
ALIGNED = {*POINTERS, "columns", "stride_row", "part"}
ONE_ROW = {"SHIFT": 16, "LANES": 256, "LIST": 2048, "TILE": 4096}
CASES: dict[str, tuple[Any, dict[str, Any], int, dict[str, str]]] = {
    "spell out": (spell_out_kernel, {"BLOCK_TOKENS": 16, "BLOCK": 128}, 4, {}),
    "embed": (embed_kernel, {"HIDDEN": 4096, "BLOCK": 1024}, 4, {"p_out": "*bf16"}),
    "greedy of one row": (
        best_kernel,
        {"STEPS": 1, "BLOCK": 1024, "SPLITS": 126, "BLOCK_SPLITS": 128, "HAS_SLOTS": True},
        4,
        {},
    ),
    "greedy of many rows": (
        best_kernel,
        {"STEPS": 8, "BLOCK": 2048, "SPLITS": 8, "BLOCK_SPLITS": 8, "HAS_SLOTS": True},
        4,
        {},
    ),
    "weigh": (weigh_kernel, {"SHIFT": 16, "LANES": 128}, 4, {}),
    "draw": (draw_kernel, {**ONE_ROW, "BLOCK_PARTS": 128}, 8, {}),
    "draw from float32": (
        draw_kernel,
        {**ONE_ROW, "BLOCK_PARTS": 8, "SHIFT": 0},
        8,
        {"p_logits": "*fp32"},
    ),
    "best keys": (top_kernel, {**ONE_ROW, "WIDTH": 64}, 8, {}),
    "best keys of float32": (
        top_kernel,
        {**ONE_ROW, "WIDTH": 128, "SHIFT": 0},
        8,
        {"p_logits": "*fp32"},
    ),
    "penalise": (penalise_kernel, {"BLOCK": 2048}, 8, {"p_logits": "*fp32"}),
    "log total": (log_total_kernel, {"LANES": 256}, 8, {"p_out": "*fp64"}),
}


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("case", CASES)
def test_compiles_with_wide_loads_and_without_spills(
    case: str, capability: int, tmp_path: Path
) -> None:
    kernel, constants, warps, types = CASES[case]
    types = {**POINTERS, **types}
    built = build(kernel, constants, types, ALIGNED, capability, num_warps=warps)
    if "logits" in " ".join(kernel.arg_names):
        assert re.search(r"(ld\.global[.\w]*\.v4\.b32|cp\.async\.cg)", built.asm["ptx"])
    assert_nothing_spilled(built, tmp_path)
