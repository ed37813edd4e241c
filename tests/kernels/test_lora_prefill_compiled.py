"""The LoRA kernels for many rows compile without a GPU; on Hopper y never changes lanes."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402 (after the skip)
from triton.compiler import ASTSource  # noqa: E402

from kernels.lora.triton_prefill_expand import prefill_expand_kernel  # noqa: E402
from kernels.lora.triton_prefill_shrink import prefill_shrink_kernel  # noqa: E402
from kernels.lora.triton_prefill_silu import prefill_silu_kernel  # noqa: E402

POINTERS = {
    **{"p_x": "*bf16", "p_y": "*bf16", "p_out": "*bf16", "p_h": "*fp32", "p_down": "*fp32"},
    **{"p_arena": "*u8", "p_descriptors": "*i64", "p_offsets": "*i32", "p_numbers": "*i64"},
}
ALIGNED = {
    *(*POINTERS, "K", "width", "max_rank", "stride_x", "stride_y", "stride_part", "stride_down"),
}
SHARED: dict[str, Any] = {"BLOCK_SEGMENTS": 64, "BLOCK_ROWS": 64, "ITEM": 2, "EVEN": True}
TILES = {**SHARED, "PARTS": 2, "BLOCK_RANKS": 16, "BLOCK_N": 64, "PRECISION": "halves"}
TILES |= {"WARPS": 4, "STAGES": 3}
EXPAND = {**TILES, "SITES": 3, "VECTOR": 16, "USE_TURNS": False}
SHRINK = {**SHARED, "SITES": 3, "BLOCK_RANKS": 64, "BLOCK_K": 64, "STAGES": 4}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "shrink": (prefill_shrink_kernel, SHRINK),
    "shrink of one site": (prefill_shrink_kernel, {**SHRINK, "SITES": 1, "BLOCK_RANKS": 16}),
    "expand": (prefill_expand_kernel, EXPAND),
    "expand of high ranks": (
        prefill_expand_kernel,
        {**EXPAND, "BLOCK_RANKS": 16, "USE_TURNS": True, "STAGES": 1},
    ),
    "expand of ranks up to 128": (prefill_expand_kernel, {**EXPAND, "BLOCK_RANKS": 128}),
    "expand of odd widths": (prefill_expand_kernel, {**EXPAND, "VECTOR": 1, "EVEN": False}),
    "activation": (prefill_silu_kernel, TILES),
}


def compiled(case: str, capability: int) -> Any:
    kernel, constants = CASES[case]
    constants = {**constants, "USE_PDL": capability >= 90}
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
def test_compiles_without_spills(case: str, capability: int, tmp_path: Path) -> None:
    built = compiled(case, capability)
    ptx = built.asm["ptx"]
    assert ("griddepcontrol.wait" in ptx) == (capability >= 90)
    assert ("wgmma" if capability >= 90 else "mma.sync") in ptx
    binary = tmp_path / "kernel.cubin"
    binary.write_bytes(built.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    usage = subprocess.run(
        [tool, "--dump-resource-usage", binary], capture_output=True, text=True, check=True
    ).stdout
    assert re.search(r"STACK:0\b", usage) and re.search(r"LOCAL:0\b", usage), usage


@pytest.mark.parametrize("case", ["expand", "activation"])
def test_y_goes_from_memory_to_the_lanes_of_its_delta(case: str) -> None:
    built = compiled(case, 90)
    ptx = built.asm["ptx"]
    assert len(re.findall(r"cp\.async\.cg", ptx)) >= 8  # asynchronous, 16 bytes a lane
    assert len(re.findall(r"st\.global[.\w]*\.v4\.b32", ptx)) == 4  # 64 x 64 by 128 lanes
    loop = built.asm["ttgir"].split("scf.for", 1)[1].split("scf.yield", 1)[0]
    moved = re.findall(r"ttg\.convert_layout %\S+ : tensor<(\S+), \S+ -> tensor<\S+, (\S+)", loop)
    stored = re.findall(r"ttg\.local_alloc %\S+ : \(tensor<([\dx]+)x", loop)
    assert all(int(shape.split("x")[0]) < 64 for shape in stored), stored  # B alone
    assert len(moved) <= 2, moved  # names of layouts; the next test counts what they cost


def test_a_tile_takes_no_detour_through_shared_memory() -> None:
    """Only B does: 16 x 64 values are 4 words a lane, a tile of y would be 16 more."""
    ptx = compiled("expand", 90).asm["ptx"]
    loop = ptx[ptx.index("wgmma") :]
    assert len(re.findall(r"st\.shared|stmatrix", loop)) <= 4
