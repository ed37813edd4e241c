"""Compiles kernels for NVIDIA GPUs that need not be there, and looks into what came out."""

import re
import subprocess
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


def build(
    kernel: Any,
    constants: Mapping[str, Any],
    types: Mapping[str, str],
    aligned: Collection[str],
    capability: int = 90,
    source: Any = ASTSource,
    **options: Any,
) -> Any:
    """Compile for a compute capability (90 is Hopper's).

    Arguments that are no constants are of ``types``, "i32" where these say nothing; those in
    ``aligned`` are multiples of 16. ``source`` is Gluon's for kernels of that language.
    """
    signature, values, attributes = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], values[index,] = "constexpr", constants[name]
            continue
        signature[name] = types.get(name, "i32")
        if name in aligned:
            attributes[index,] = [["tt.divisibility", 16]]
    return triton.compile(
        source(kernel, signature, values, attributes),
        target=GPUTarget("cuda", capability, 32),
        options={"enable_fp_fusion": True, **options},
    )


def resource_usage(built: Any, folder: Path) -> str:
    """Registers, stack and memory of a kernel, as ``cuobjdump`` writes them."""
    return _read("cuobjdump", "--dump-resource-usage", built, folder)


def disassembly(built: Any, folder: Path) -> str:
    """The instructions of a kernel, as ``nvdisasm`` writes them."""
    return _read("nvdisasm", "-c", built, folder)


def assert_nothing_spilled(built: Any, folder: Path) -> None:
    """All that a kernel's threads keep is in registers."""
    usage = resource_usage(built, folder)
    assert re.search(r"STACK:0\b", usage) and re.search(r"LOCAL:0\b", usage), usage


def _read(tool: str, option: str, built: Any, folder: Path) -> str:
    binary = folder / "kernel.cubin"
    binary.write_bytes(built.asm["cubin"])
    command = [Path(triton.__file__).parent / "backends/nvidia/bin" / tool, option, binary]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
