"""Gains and biases compile without a GPU, reading and writing vectors."""

import re
from typing import Any

import pytest
import torch

pytest.importorskip("triton")


from kernels.lora.gpu_affine import BLOCK_N, BLOCK_ROWS
from kernels.lora.triton_affine import affine_kernel
from tests.kernels.compiled.build import build

TYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}


def compiled(dtype: torch.dtype, sites: int, *, biased: bool, segments: int) -> Any:
    """The kernel as launched."""
    constants = {
        "SITES": sites,
        "HAS_BIAS": biased,
        "BLOCK_SEGMENTS": segments,
        "BLOCK_ROWS": BLOCK_ROWS,
        "BLOCK_N": BLOCK_N,
    }
    pointers = {
        **{"p_y": TYPES[dtype], "p_bias": TYPES[dtype], "p_arena": "*u8"},
        **{"p_descriptors": "*i64", "p_offsets": "*i32", "p_numbers": "*i64"},
    }
    return build(affine_kernel, constants, pointers, {*pointers, "stride_y"}, num_warps=4)


@pytest.mark.parametrize("segments", [0, 16])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_compiles_without_local_memory(dtype: torch.dtype, biased: bool, segments: int) -> None:
    ptx = compiled(dtype, 3, biased=biased, segments=segments).asm["ptx"]
    assert "st.global" in ptx and ".local" not in ptx
    assert bool(re.search(r"fma\.rn\.f32|mul\.f32|mul\.rn\.f32", ptx))
