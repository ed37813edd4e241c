"""The NF4 product in Gluon compiles for Hopper without a GPU, and its products stay in flight."""

import re
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")
pytest.importorskip("triton.experimental.gluon")

from triton.experimental.gluon import language as gl  # noqa: E402
from triton.experimental.gluon._runtime import GluonASTSource  # noqa: E402

from kernels.nf4.wide_config import TABLE, WideConfig  # noqa: E402
from kernels.nf4.wide_kernel import nf4_wide  # noqa: E402
from tests.kernels.compiled.build import build, disassembly  # noqa: E402

CONFIGS = (
    WideConfig(rows=32, tiles=8, warps=4, blocks=2, programs=2, table=True),
    WideConfig(rows=128, tiles=4, warps=4, programs=2),
    WideConfig(rows=256),
    WideConfig(rows=256, stages=3, table=True),
)
POINTERS = {
    **{"p_table": "*i32", "p_bias": "*bf16", "p_y": "*bf16", "p_partial": "*fp32"},
    "p_count": "*i32",
}
COPIES = "tensordesc<{}[{},{}],{!r}>"


def compiled(config: WideConfig) -> Any:
    rows = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    words = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    types = {
        **POINTERS,
        "x_desc": COPIES.format("bf16", config.rows, 64 * config.blocks, rows),
        "w_desc": COPIES.format("i32", config.tiles, 128 * config.blocks, words),
        "s_desc": COPIES.format("i32", 1, 16 * config.tiles, words),
        "y_desc": COPIES.format("bf16", config.rows, 16 * config.tiles, rows),
    }
    constants = {"STAGES": config.stages, "ROW_TILES": 2, "USE_SHARED": config.table}
    options = {"num_warps": config.warps, "maxnreg": config.registers}
    return build(nf4_wide, constants, types, POINTERS, source=GluonASTSource, **options)


def instructions(built: Any, folder: Path) -> list[str]:
    return re.findall(
        r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", disassembly(built, folder), re.MULTILINE
    )


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_weights_are_unpacked_while_a_product_is_in_flight(
    config: WideConfig, tmp_path: Path
) -> None:
    code = instructions(compiled(config), tmp_path)
    products = [i for i, line in enumerate(code) if "HGMMA" in line]
    assert len(products) == 8 * config.blocks * config.tiles // config.warps  # of two steps
    loop = code[products[0] : products[-1]]
    # Never all products of a step at once: one step's run while the next one's weights unpack.
    waits = [line for line in loop if "WARPGROUP.DEPBAR" in line]
    assert len(waits) == 1 and waits[0].endswith("0x1")
    assert not any(line.startswith(("STL", "LDL")) for line in loop)
    # So many permutations for a word of eight weights; a change of layout would add to them.
    words = 4 * config.blocks * config.tiles // config.warps
    assert sum("PRMT" in line for line in loop) == (4 if config.table else 12) * words


def test_more_than_a_processor_holds_is_refused() -> None:
    """Programs wait for each other, so all must be there at once."""
    with pytest.raises(ValueError, match="stages"):
        WideConfig(rows=256, stages=5)
    with pytest.raises(ValueError, match="stages"):
        WideConfig(rows=128, tiles=4, warps=4, stages=6, programs=2)
    with pytest.raises(ValueError, match="outputs"):
        WideConfig(rows=128, tiles=16, stages=1, programs=2)
    with pytest.raises(ValueError, match="stages must be more beside a table"):
        WideConfig(rows=16, tiles=4, warps=4, table=True)
    with pytest.raises(ValueError, match="tiles"):
        WideConfig(rows=64, tiles=4)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_the_memory_a_config_counts_is_what_the_kernel_takes(config: WideConfig) -> None:
    taken = compiled(config).metadata.shared + (TABLE if config.table else 0)
    assert taken <= config.shared < taken + 256
