"""The Triton kernels of attention and of the fused family compile for sm_80 and sm_90."""

from typing import Any

import pytest

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from kernels.attention.decode_kernel import decode_kernel  # noqa: E402
from kernels.attention.place_kernel import rotate_store_kernel, store_kernel  # noqa: E402
from kernels.attention.prefill_kernel import prefill_kernel  # noqa: E402
from kernels.attention.tiles import (  # noqa: E402
    Tile,
    decode_tile,
    merged_at_once,
    power_of_two,
    prefill_tile,
)
from kernels.fused.gpu_kernels import norm_kernel, rotary_kernel, silu_mul_kernel  # noqa: E402

SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024}
"""Bytes that one program may have."""
WORDS = ("p_contexts", "p_count", "p_offsets", "p_pages", "p_slots", "p_table")
FLOATS = ("p_cos_sin", "p_lse", "p_part")

pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def compiled(
    kernel: Any, constants: dict[str, Any], capability: int, warps: int = 4, stages: int = 3
) -> Any:
    """Compile for bfloat16, with everything that may be aligned to 16 bytes so aligned."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else kind(name) for name in names}
    aligned = [name for name in names if name[:2] == "p_" or name[:7] == "stride_"]
    source = ASTSource(
        kernel,
        signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target, {"num_warps": warps, "num_stages": stages})


def kind(name: str) -> str:
    if name == "p_positions":
        return "*i64"
    if name[:2] == "p_":
        return "*i32" if name in WORDS else "*fp32" if name in FLOATS else "*bf16"
    return "fp32" if name in ("scale", "eps") else "i32"


def attention_constants(tile: Tile, group: int, dim: int, window: bool) -> dict[str, Any]:
    return {
        **{"GROUP": group, "DIM": dim, "PAGE": 16, "HAS_WINDOW": window, "PRECISION": "ieee"},
        **{"BLOCK_M": tile.lines, "BLOCK_N": tile.keys, "BLOCK_D": power_of_two(dim)},
    }


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(
    ("group", "dim", "window"), [(4, 128, False), (7, 80, True), (1, 256, False)]
)
def test_decode(group: int, dim: int, window: bool, capability: int) -> None:
    tile = decode_tile(group, dim, 2)
    constants = attention_constants(tile, group, dim, window) | {
        **{"HAS_SPLITS": True, "BLOCK_G": power_of_two(group)},
        "BLOCK_S": merged_at_once(group, dim),
    }
    found = compiled(decode_kernel, constants, capability, tile.warps, tile.stages)
    assert found.metadata.shared <= SHARED_MEMORY[capability] // 2, "two programs share an SM"
    assert found.asm["ptx"].count("cp.async.cg.shared.global") >= 16
    assert "mma.sync" in found.asm["ptx"]


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(("rows", "group", "dim"), [(2048, 4, 128), (5, 7, 80), (512, 1, 256)])
def test_prefill(rows: int, group: int, dim: int, capability: int) -> None:
    tile = prefill_tile(rows, group, dim, 2)
    constants = attention_constants(tile, group, dim, group == 7)
    constants |= {"BLOCK_B": 64, "HAS_DECODES": True}
    found = compiled(prefill_kernel, constants, capability, tile.warps, tile.stages)
    assert found.metadata.shared <= SHARED_MEMORY[capability]
    product = "wgmma" if capability == 90 and tile.lines >= 64 else "mma.sync"
    assert product in found.asm["ptx"]


@pytest.mark.parametrize("capability", [80, 90])
def test_small_kernels(capability: int) -> None:
    heads = {"DIM": 128, "BLOCK_H": 8}
    paged = {**heads, "PAGE": 16}
    for kernel, constants in (
        (store_kernel, {**paged, "HEADS": 8, "BLOCK_D": 128}),
        (
            rotate_store_kernel,
            {**paged, "Q_HEADS": 32, "KV_HEADS": 8, "BLOCK_HALF": 64, "HAS_NORM": True},
        ),
        (rotary_kernel, {**heads, "Q_HEADS": 32, "K_HEADS": 8, "BLOCK_HALF": 64}),
        (silu_mul_kernel, {"WIDTH": 14336, "BLOCK": 1024}),
        (
            norm_kernel,
            {"INNER": 1, "DIM": 4096, "BLOCK_L": 1, "BLOCK_D": 4096, "HAS_RESIDUAL": True},
        ),
    ):
        found = compiled(kernel, constants, capability)
        assert "ld.global.v4" in found.asm["ptx"], kernel.__name__
        assert ".local" not in found.asm["ptx"], kernel.__name__
