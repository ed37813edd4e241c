"""The Triton kernels of attention and of the fused family compile for sm_80, sm_89 and sm_90."""

from typing import Any

import pytest

pytest.importorskip("triton")

from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language import NVMMASharedLayout

from kernels.attention.decode_kernel import decode_kernel
from kernels.attention.hopper_kernel import hopper_kernel
from kernels.attention.place_kernel import rotate_store_kernel, store_kernel
from kernels.attention.prefill_kernel import prefill_kernel
from kernels.attention.tiles import (
    decode_tile,
    hopper_tile,
    merged_at_once,
    power_of_two,
    prefill_tile,
)
from kernels.fused.gpu_kernels import norm_kernel, rotary_kernel, silu_mul_kernel
from tests.kernels.compiled.build import build

SHARED_MEMORY = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024}
"""Bytes that one program may have."""
WORDS = ("p_contexts", "p_count", "p_offsets", "p_pages", "p_slots", "p_table")
FLOATS = ("p_cos_sin", "p_lse", "p_part")

pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def compiled(
    kernel: Any,
    constants: dict[str, Any],
    capability: int,
    warps: int = 4,
    stages: int = 3,
    descriptors: dict[str, str] | None = None,
) -> Any:
    """Compile for bfloat16, with everything that may be aligned to 16 bytes so aligned."""
    names = kernel.arg_names
    return build(
        kernel,
        constants,
        {**{name: kind(name) for name in names}, **(descriptors or {})},
        [name for name in names if name[:2] == "p_" or name[:7] == "stride_"],
        capability,
        GluonASTSource if descriptors else ASTSource,
        num_warps=warps,
        num_stages=stages,
    )


def kind(name: str) -> str:
    if name == "p_positions":
        return "*i64"
    if name[:2] == "p_":
        return "*i32" if name in WORDS else "*fp32" if name in FLOATS else "*bf16"
    return "fp32" if name in ("scale", "eps") else "i32"


def attention_constants(
    lines: int, keys: int, group: int, dim: int, window: bool
) -> dict[str, Any]:
    return {
        **{"GROUP": group, "DIM": dim, "PAGE": 16, "HAS_WINDOW": window},
        **{"BLOCK_M": lines, "BLOCK_N": keys, "BLOCK_D": power_of_two(dim)},
    }


@pytest.mark.parametrize("capability", SHARED_MEMORY)
@pytest.mark.parametrize("is_new", [False, True])
@pytest.mark.parametrize(
    ("group", "dim", "window", "pairs"),
    [(4, 128, False, 256), (4, 128, False, 8), (7, 80, True, 256), (1, 256, False, 8)],
)
def test_decode(
    group: int, dim: int, window: bool, pairs: int, is_new: bool, capability: int
) -> None:
    tile = decode_tile(pairs, 1024, dim, 2, SHARED_MEMORY[capability])
    constants = attention_constants(max(16, power_of_two(group)), tile.keys, group, dim, window) | {
        **{"HAS_SPLITS": True, "BLOCK_G": power_of_two(group)},
        **{"BLOCK_S": merged_at_once(group, dim), "IS_NEW": is_new, "HAS_NORM": window},
        **{"USE_PDL": is_new and capability == 90, "ROW_IS_B": is_new},
    }
    found = compiled(decode_kernel, constants, capability, tile.warps, tile.stages)
    assert ("griddepcontrol.wait" in found.asm["ptx"]) == constants["USE_PDL"]
    programs = 1 if pairs == 8 else 2  # on a multiprocessor
    assert found.metadata.shared <= SHARED_MEMORY[capability] // programs
    assert found.asm["ptx"].count("cp.async.cg.shared.global") >= 16
    assert "mma.sync" in found.asm["ptx"]


@pytest.mark.parametrize("capability", SHARED_MEMORY)
@pytest.mark.parametrize(
    ("rows", "group", "dim", "splits"),
    [(2048, 4, 128, False), (2048, 4, 128, True), (5, 7, 80, True), (512, 2, 256, True)],
)
def test_prefill(rows: int, group: int, dim: int, splits: bool, capability: int) -> None:
    tile = prefill_tile(rows, group, dim, 2, SHARED_MEMORY[capability])
    constants = attention_constants(tile.lines, tile.keys, group, dim, group == 7)
    constants |= {"BLOCK_B": 64, "HAS_SPLITS": splits, "MIN_SPLIT": 256}
    found = compiled(prefill_kernel, constants, capability, tile.warps, tile.stages)
    assert found.metadata.shared <= SHARED_MEMORY[capability]
    product = "wgmma" if capability == 90 and tile.lines >= 64 else "mma.sync"
    assert product in found.asm["ptx"]


@pytest.mark.parametrize(("page", "group", "dim"), [(16, 4, 128), (64, 7, 64)])
def test_hopper(page: int, group: int, dim: int) -> None:
    tile = hopper_tile(1)
    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    rows = f"tensordesc<bf16[{page}, 64],{layout!r}>"
    constants = {
        **{"GROUP": group, "DIM": dim, "PAGE": page, "BLOCK_N": tile.keys, "BLOCK_B": 64},
        **{"STAGES": tile.stages, "HAS_WINDOW": group == 7},
    }
    found = compiled(hopper_kernel, constants, 90, descriptors={"k_rows": rows, "v_rows": rows})
    assert found.metadata.shared <= SHARED_MEMORY[90]
    copies = 2 * tile.keys // page * dim // 64
    assert found.asm["ptx"].count("cp.async.bulk.tensor.2d.shared") == copies
    assert "wgmma" in found.asm["ptx"]


@pytest.mark.parametrize("capability", [80, 90])
def test_small_kernels(capability: int) -> None:
    heads = {"DIM": 128, "BLOCK_H": 8}
    paged, both, overlap = {**heads, "PAGE": 16}, {"HAS_DELTA": True}, {"USE_PDL": capability == 90}
    line = {"INNER": 1, "DIM": 4096, "BLOCK_L": 1, "BLOCK_D": 4096}
    for kernel, constants in (
        (store_kernel, {**paged, "HEADS": 8, "BLOCK_D": 128}),
        (
            rotate_store_kernel,
            {**paged, "Q_HEADS": 32, "KV_HEADS": 8, "BLOCK_HALF": 64, "HAS_NORM": True},
        ),
        (rotary_kernel, {**heads, "Q_HEADS": 32, "K_HEADS": 8, "BLOCK_HALF": 64}),
        (silu_mul_kernel, {**both, **overlap, "WIDTH": 14336, "BLOCK": 1024}),
        (
            norm_kernel,
            {**line, **both, **overlap, "HAS_RESIDUAL": True},
        ),
    ):
        found = compiled(kernel, constants, capability)
        assert "ld.global.v4" in found.asm["ptx"], kernel.__name__
        assert ".local" not in found.asm["ptx"], kernel.__name__
