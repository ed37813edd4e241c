"""The NF4 kernels compile for Ampere and Hopper without a GPU: weights never change lanes."""

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")


from kernels.nf4.choice import choose
from kernels.nf4.expand_kernel import expand_scaled
from kernels.nf4.gemm_kernel import nf4_gemm
from tests.kernels.compiled.build import assert_nothing_spilled, build, disassembly

POINTERS = {
    **{"p_x": "*bf16", "p_y": "*bf16", "p_bias": "*bf16", "p_out": "*bf16", "p_partial": "*fp32"},
    **{"p_words": "*i32", "p_scales": "*i32", "p_table": "*i32", "p_arrived": "*i32"},
}
ALIGNED = {*POINTERS, "features", "columns", "padded", "stride_x"}
FLAGS = {"HAS_BIAS": True, "EVEN_COLUMNS": True, "USE_PRMT": True}
BY_MMA = {**FLAGS, "QUADS": True, "SCALE_WEIGHTS": False, "STAGES": 4, "BLOCKS": 2}
CASES: dict[str, tuple[Any, dict[str, Any], int]] = {
    "one way": (nf4_gemm, {**BY_MMA, "TILES": 4, "BM": 16, "SPLIT": 4, "WAYS": 1}, 2),
    "four ways": (nf4_gemm, {**BY_MMA, "TILES": 1, "BM": 8, "SPLIT": 1, "WAYS": 4}, 4),
    "expand": (expand_scaled, {"TILES": 4, "PAIRS": 1, "USE_PRMT": True}, 4),
}
BY_WARPGROUPS = {
    **FLAGS,
    **{"QUADS": False, "SCALE_WEIGHTS": True, "STAGES": 4, "BLOCKS": 1},
    **{"TILES": 8, "BM": 256, "SPLIT": 1, "WAYS": 1},
}


def compiled(kernel: Any, constants: dict[str, Any], warps: int, capability: int) -> Any:
    if kernel is nf4_gemm:
        constants = {**constants, "USE_PDL": capability >= 90}
    stages = constants.get("STAGES", 3)
    return build(
        kernel, constants, POINTERS, ALIGNED, capability, num_warps=warps, num_stages=stages
    )


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("case", CASES)
def test_compiles_without_spills_or_shuffled_weights(
    case: str, capability: int, tmp_path: Path
) -> None:
    kernel, constants, warps = CASES[case]
    built = compiled(kernel, constants, warps, capability)
    assert re.search(r"(ld\.global[.\w]*\.v4\.b32|cp\.async\.cg)", built.asm["ptx"])
    assert_nothing_spilled(built, tmp_path)
    if kernel is nf4_gemm:
        # 12 permutations a word of eight weights; a change of layout would add to them.
        words = constants["TILES"] * constants["BLOCKS"] * 4 * constants["WAYS"] // warps
        found = len(re.findall(r"\bPRMT\b", disassembly(built, tmp_path)))
        assert 12 * words <= found < 12 * words + 12


def test_many_rows_multiply_by_warpgroups_without_spills(tmp_path: Path) -> None:
    built = compiled(nf4_gemm, BY_WARPGROUPS, 8, 90)
    assert "wgmma.mma_async" in built.asm["ptx"]
    assert_nothing_spilled(built, tmp_path)


@pytest.mark.parametrize("rows", [64, 128, 256])
def test_what_is_chosen_fits_into_the_shared_memory_of_small_gpus(rows: int) -> None:
    config = choose(rows, 28672, 64, 99 << 10)
    constants = {
        **FLAGS,
        **{"QUADS": not config.by_warpgroups, "SCALE_WEIGHTS": config.scale_weights},
        **{"STAGES": config.stages, "BLOCKS": config.blocks, "TILES": config.tiles},
        **{"BM": config.rows, "SPLIT": config.split, "WAYS": config.ways},
    }
    built = compiled(nf4_gemm, constants, config.warps, 89)
    assert built.metadata.shared <= config.shared <= 99 << 10
