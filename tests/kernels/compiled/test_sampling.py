"""The kernels at both ends of a step compile for Ampere and Hopper without a GPU."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402 (after the skip)
from triton.compiler import ASTSource  # noqa: E402

from kernels.entry.gpu_kernels import embed_kernel, spell_out_kernel  # noqa: E402
from kernels.sampling.best_kernel import best_kernel  # noqa: E402
from kernels.sampling.draw_kernel import draw_kernel, weigh_kernel  # noqa: E402
from kernels.sampling.penalise_kernel import penalise_kernel  # noqa: E402
from kernels.sampling.top_kernel import log_total_kernel, top_kernel  # noqa: E402

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
    signature, values, attributes = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], values[index,] = "constexpr", constants[name]
            continue
        signature[name] = {**POINTERS, **types}.get(name, "i32")
        if name in ALIGNED:
            attributes[index,] = [["tt.divisibility", 16]]
    built = triton.compile(
        ASTSource(kernel, signature, values, attributes),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": warps, "enable_fp_fusion": True},
    )
    if "logits" in " ".join(kernel.arg_names):
        assert re.search(r"(ld\.global[.\w]*\.v4\.b32|cp\.async\.cg)", built.asm["ptx"])
    binary = tmp_path / "kernel.cubin"
    binary.write_bytes(built.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    usage = subprocess.run(
        [tool, "--dump-resource-usage", binary], capture_output=True, text=True, check=True
    ).stdout
    assert re.search(r"STACK:0\b", usage) and re.search(r"LOCAL:0\b", usage), usage
