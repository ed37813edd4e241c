"""The byte permutations that stand for the NF4 table, executed on integers."""

import re

import torch

from kernels.nf4 import NF4_CODE
from kernels.nf4.codebook import ASSEMBLY, BITS, GAIN, ORDER, RENUMBERED, TABLE, ZERO

MASK = (1 << 32) - 1


def prmt(a: int, b: int, selector: int) -> int:
    """The instruction, by its definition."""
    pool = [(a >> 8 * i) & 255 for i in range(4)] + [(b >> 8 * i) & 255 for i in range(4)]
    out = 0
    for i in range(4):
        nibble = (selector >> 4 * i) & 15
        byte = pool[nibble & 7]
        if nibble & 8:
            byte = 255 if byte >> 7 else 0
        out |= byte << 8 * i
    return out


def execute(word: int) -> list[int]:
    """Run ASSEMBLY on one word; returns its eight 16-bit outputs."""
    known: dict[str, int] = {"$8": word}
    known |= {f"${9 + i}": value for i, value in enumerate(TABLE)}

    def read(operand: str) -> int:
        return known[operand] if operand in known else int(operand, 0)

    for line in ASSEMBLY.splitlines():
        text = line.strip().rstrip(";")
        if text in ("{", "}") or text.startswith(".reg"):
            continue
        halves = re.fullmatch(r"mov\.b32 \{(\$\d), (\$\d)\}, (\w)", text)
        if halves:
            value = read(halves[3])
            known[halves[1]], known[halves[2]] = value & 0xFFFF, value >> 16
            continue
        name, rest = text.split(" ", 1)
        target, *operands = rest.split(", ")
        values = [read(operand) for operand in operands]
        if name == "mov.b32":
            known[target] = values[0]
        elif name == "xor.b32":
            known[target] = values[0] ^ values[1]
        elif name == "mul.hi.u32":
            known[target] = (values[0] * values[1]) >> 32
        else:
            assert name == "prmt.b32", text
            known[target] = prmt(*values) & MASK
    return [known[f"${i}"] for i in range(8)]


def test_every_code_comes_out_at_every_place() -> None:
    for code in range(16):
        for around in (0, 7, 8, 15):
            for place in range(8):
                codes = [around] * 8
                codes[place] = code
                word = sum(c << 4 * i for i, c in enumerate(codes))
                assert execute(word) == [BITS[c] for c in codes]


def test_renumbering_is_a_permutation_that_keeps_zero() -> None:
    assert sorted(ORDER) == list(range(16))
    assert [ORDER[RENUMBERED[code]] for code in range(16)] == list(range(16))
    assert BITS[ZERO] in (0, 0x8000)


def test_table_values_are_the_nearest_bfloat16_of_the_scaled_code() -> None:
    exact = torch.tensor(NF4_CODE, dtype=torch.float64)[list(ORDER)] * GAIN
    held = (torch.tensor(BITS, dtype=torch.int64) << 16).to(torch.int32).view(torch.float32)
    assert torch.equal(held, exact.float().bfloat16().float())
    error = (held.double() - exact).abs() / exact.abs().clamp(min=1e-9)
    assert float(error.max()) < 0.002
