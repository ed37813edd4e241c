"""The LoRA kernels compile for Ampere and Hopper without a GPU, with wide loads and no spills."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402 (after the skip)
from triton.compiler import ASTSource  # noqa: E402

from kernels.lora.triton_expand import expand_kernel  # noqa: E402
from kernels.lora.triton_shrink import shrink_kernel  # noqa: E402

POINTERS = {
    **{"p_x": "*bf16", "p_y": "*bf16", "p_h": "*fp32", "p_arena": "*u8"},
    **{"p_descriptors": "*i64", "p_offsets": "*i32", "p_numbers": "*i64"},
}
ALIGNED = {*POINTERS, "K", "stride_x", "stride_y", "stride_part", "max_rank"}
SHARED: dict[str, Any] = {"BLOCK_RANKS": 16, "ITEM": 2}
SHRINK = {**SHARED, "SITES": 3, "BLOCK_K": 512}
EXPAND = {
    **SHARED,
    "SITES": 2,
    "PARTS": 8,
    "BLOCK_N": 256,
    "VECTOR": 16,
    "PRECISION": "halves",
}
EXPAND["USE_TURNS"] = True
SUMS = {"BLOCK_SEGMENTS": 0, "BLOCK_ROWS": 4, "USE_DOT": False}
DOTS = {"BLOCK_SEGMENTS": 64, "BLOCK_ROWS": 16, "USE_DOT": True}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "shrink by sums": (shrink_kernel, {**SHRINK, **SUMS}),
    "shrink of some rows": (shrink_kernel, {**SHRINK, **DOTS}),
    "shrink of one site": (shrink_kernel, {**SHRINK, **SUMS, "SITES": 1}),
    "expand of one site": (expand_kernel, {**EXPAND, **SUMS, "SITES": 1}),
    "expand by sums": (expand_kernel, {**EXPAND, **SUMS}),
    "expand of some rows": (expand_kernel, {**EXPAND, **DOTS}),
}


def compiled(kernel: Any, constants: dict[str, Any], capability: int) -> Any:
    signature, values, attributes = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], values[index,] = "constexpr", constants[name]
            continue
        signature[name] = POINTERS.get(name, "i32")
        if name in ALIGNED:
            attributes[index,] = [["tt.divisibility", 16]]
    return triton.compile(
        ASTSource(kernel, signature, values, attributes),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": 4, "num_stages": 1, "enable_fp_fusion": True},
    )


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("case", CASES)
def test_compiles(case: str, capability: int, tmp_path: Path) -> None:
    kernel, constants = CASES[case]
    overlap = capability >= 90
    built = compiled(kernel, {**constants, "USE_PDL": overlap}, capability)
    ptx = built.asm["ptx"]
    assert re.search(r"(ld\.global[.\w]*\.v4\.b32|cp\.async\.cg)", ptx), "no wide loads"
    assert ("griddepcontrol.wait" in ptx) == overlap
    assert ("mma" in ptx) == constants["USE_DOT"]
    binary = tmp_path / "kernel.cubin"
    binary.write_bytes(built.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    usage = subprocess.run(
        [tool, "--dump-resource-usage", binary], capture_output=True, text=True, check=True
    ).stdout
    assert re.search(r"STACK:0\b", usage) and re.search(r"LOCAL:0\b", usage), usage


def test_adapters_are_read_before_the_wait_and_rows_after_it() -> None:
    for case in ("shrink by sums", "expand by sums"):
        kernel, constants = CASES[case]
        ptx = compiled(kernel, {**constants, "USE_PDL": True}, 90).asm["ptx"]
        waits = [found.start() for found in re.finditer(r"griddepcontrol\.wait", ptx)]
        assert len(waits) == 2  # of programs with and without work
        wide = ptx.index(".v4.b32")
        assert wide < min(w for w in waits if w > wide) and wide < ptx.index("st.global")
        assert re.search(r"ld\.global", ptx[min(w for w in waits if w > wide) :])
