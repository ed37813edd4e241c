"""The kernels compile for Ampere and Hopper without a GPU, and move 16 bytes a thread and time."""

import re
from typing import Any

import pytest

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402 (after the skip)
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from kernels.reduce import SHARE_PIECE  # noqa: E402
from kernels.reduce.gpu_kernels import share_stamped, sum_signalled, sum_stamped  # noqa: E402

ALIGNED = [["tt.divisibility", 16]]
ROW, WARPS = 2048, 8
"""Words and warps of a row of 4096 16-bit values."""


def compiled(kernel: Any, capability: int, ranks: int = 2, **constants: Any) -> str:
    constants = {"RANK": 1, "WORLD": ranks, "BLOCK": ROW, **constants}
    constants = {"DTYPE": tl.bfloat16, "NORM": True, **constants}
    word = "*i32" if kernel is sum_signalled else "*i64"
    signature: dict[str, Any] = {}
    values, attributes = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], values[index,] = "constexpr", constants[name]
        elif name == "eps":
            signature[name] = "fp32"
        elif name in ("p_peers", "p_signals"):
            signature[name] = (word,) * ranks
            attributes |= {(index, rank): ALIGNED for rank in range(ranks)}
        else:
            signature[name] = "*i32" if name.startswith("p_") else "i32"
            attributes[index,] = ALIGNED
    text: str = triton.compile(
        ASTSource(kernel, signature, values, attributes),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": WARPS, "enable_fp_fusion": True},
    ).asm["ptx"]
    assert not re.search(r"(st|ld)\.local", text)
    return text


def threads_words(text: str, pattern: str, words: int) -> int:
    """Words that a thread moves by instructions of ``words`` words each."""
    return words * len(re.findall(pattern, text))


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("ranks", [2, 8])
def test_words_travel_with_their_stamps(ranks: int, capability: int) -> None:
    text = compiled(sum_stamped, capability, ranks)
    mine = ROW // (32 * WARPS)
    assert threads_words(text, r"st\.global\.v2\.b64", 2) == mine * (ranks - 1)
    assert threads_words(text, r"st\.global\.v4\.b32", 4) == 2 * mine
    assert threads_words(text, r"ld\.volatile\.global\.v2\.b64", 2) % mine == 0
    share = compiled(share_stamped, capability, ranks, BLOCK=SHARE_PIECE)
    assert threads_words(share, r"st\.global\.v2\.b64", 2) == SHARE_PIECE // 256 * (ranks - 1)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("ranks", [2, 8])
def test_signals_follow_the_words(ranks: int, capability: int) -> None:
    text = compiled(sum_signalled, capability, ranks)
    words = [found.start() for found in re.finditer(r"st\.global\.v4\.b32", text)]
    signals = [found.start() for found in re.finditer(r"\.sys\.release\.exch", text)]
    waits = [found.start() for found in re.finditer(r"\.sys\.acquire\.", text)]
    sent = ROW // (32 * WARPS) // 4 * (ranks - 1)
    assert len(signals) == ranks - 1 and len(waits) == ranks - 1
    assert words[sent - 1] < signals[0] and signals[-1] < waits[0] < words[sent]


@pytest.mark.parametrize(
    ("dtype", "norm"), [(tl.float32, True), (tl.float16, True), (tl.bfloat16, False)]
)
@pytest.mark.parametrize("kernel", [sum_stamped, sum_signalled])
def test_every_type_compiles(kernel: Any, dtype: Any, norm: bool) -> None:
    assert compiled(kernel, 90, DTYPE=dtype, NORM=norm)
