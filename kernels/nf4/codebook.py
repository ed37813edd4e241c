"""The 16 NF4 values as a GPU looks them up: two byte permutations in place of a table in memory.

`prmt` picks four bytes out of eight by four 4-bit selectors, and a selector's top bit asks for the
sign of the byte, eight times, instead of the byte. Eight packed codes are eight selectors as they
are. Of a 16-entry table, split into `_FIRST` (top bit 0) and `_SECOND` (top bit 1), one `prmt`
looks up each half, the second with all top bits flipped; where the other half is meant a lookup
gives 0x00 or 0xff, and the exclusive or of both gives the entry, provided that the two entries of
an index agree in their sign bit. So the codes are renumbered: the pair of an index has one sign
and one lowest exponent bit, the two bits that are the top ones of a bfloat16's bytes.

`GAIN` scales all values. It is chosen so that such pairs exist and that rounding to bfloat16 costs
least: at most 0.19% of a value against 0.31% unscaled. Accumulators are divided by it at the end.
"""

import struct

from kernels.nf4 import NF4_CODE

GAIN = 2.748
"""Factor in `VALUES`."""

_FIRST = (0, 5, 1, 3, 8, 11, 9, 13)
_SECOND = (4, 7, 2, 6, 10, 15, 12, 14)

ORDER: tuple[int, ...] = (*_FIRST, *_SECOND)
"""ORDER[kernel code] = canonical code."""
RENUMBERED: tuple[int, ...] = tuple(ORDER.index(code) for code in range(16))
"""RENUMBERED[canonical code] = kernel code."""
ZERO = RENUMBERED[NF4_CODE.index(0.0)]
"""The kernel code of 0, which pads."""
EXACT: tuple[float, ...] = tuple(NF4_CODE[code] * GAIN for code in ORDER)
"""GAIN * value of each kernel code."""


def _bfloat16_bits(value: float) -> int:
    """Round to nearest even; zero is taken as negative, as its pair is."""
    if value == 0.0:
        return 0x8000
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    return int(bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


BITS: tuple[int, ...] = tuple(_bfloat16_bits(value) for value in EXACT)
"""EXACT as bfloat16 bits."""


def _lookup_words(shift: int) -> tuple[int, int, int, int]:
    """Return the four 32-bit table words of one byte of the values: first half, second half."""
    entries = [(bits >> shift) & 0xFF for bits in BITS]
    for first, second in zip(entries[:8], entries[8:], strict=True):
        assert first >> 7 == second >> 7, "the entries of an index must agree in their top bit"
    flipped = [entry ^ 0xFF if entry >> 7 else entry for entry in entries[8:]]
    table = bytes(entries[:8] + flipped)
    words = struct.unpack("<4I", table)
    return (words[0], words[1], words[2], words[3])


LOW, HIGH = _lookup_words(0), _lookup_words(8)
TABLE: tuple[int, ...] = (LOW[0], LOW[2], HIGH[0], HIGH[2], 1 << 16)
"""What ASSEMBLY takes from registers: half of the table words (the others are immediates in it) and
the factor of a shift, which must not be known to the compiler."""


def _assembly(*, scaled: bool) -> str:
    """Return PTX: $8 holds eight codes, lowest bits first; $0..$7 become their bfloat16 bits.

    $9..$13 hold TABLE. With `scaled`, $14 and $15 hold two bfloat16 factors, each twice: the first
    is for the pairs of codes 0, 1 and 4, 5, the second for 2, 3 and 6, 7; the products are sums
    with -0, which sm_80 has too. Without it, shifts by 16 are products, off the pipe for bitwise
    operations: the busiest one then.
    """
    shifts = ["mul.hi.u32 s1, s0, $13;", "mul.hi.u32 t1, t0, $13;"]
    if scaled:
        shifts = ["shr.u32 s1, s0, 16;", "shr.u32 t1, t0, 16;"]
    lines = [
        "{",
        ".reg .b32 s0, s1, t0, t1, a, b, l, h, p, q, z;",
        "mov.b32 s0, $8;",
        "mov.b32 z, 0x80008000;",
        "xor.b32 t0, s0, 0x88888888;",
        *shifts,
    ]
    for half in range(2):
        for plane, words, register in (("l", LOW, 9), ("h", HIGH, 11)):
            lines += [
                f"prmt.b32 a, ${register}, {words[1]:#010x}, s{half};",
                f"prmt.b32 b, ${register + 1}, {words[3]:#010x}, t{half};",
                f"xor.b32 {plane}, a, b;",
            ]
        lines += ["prmt.b32 p, l, h, 0x5140;", "prmt.b32 q, l, h, 0x7362;"]
        if scaled:
            lines += [
                "fma.rn.bf16x2 p, p, $14, z;",
                "fma.rn.bf16x2 q, q, $15, z;",
            ]
        first = 4 * half
        lines += [
            f"mov.b32 {{${first}, ${first + 1}}}, p;",
            f"mov.b32 {{${first + 2}, ${first + 3}}}, q;",
        ]
    return "\n".join([*lines, "}"])


ASSEMBLY = _assembly(scaled=False)
"""See `_assembly`; 19 instructions for eight weights."""
ASSEMBLY_SCALED = _assembly(scaled=True)

LOAD_TABLE = """{
    .reg .b32 lane;
    .reg .b64 at;
    mov.u32 lane, %laneid;
    mad.wide.u32 at, lane, 32, $5;
    ld.global.nc.v4.b32 {$0, $1, $2, $3}, [at];
    ld.global.nc.b32 $4, [at + 16];
    }"""
"""PTX: the five words of TABLE to $0..$4, each lane from its own copy (see `tables.prmt_table`): a
constant, or a value that all lanes are known to share, would be brought from a uniform register
anew for every use."""

__all__ = [
    "ASSEMBLY",
    "ASSEMBLY_SCALED",
    "BITS",
    "EXACT",
    "GAIN",
    "LOAD_TABLE",
    "ORDER",
    "RENUMBERED",
    "TABLE",
    "ZERO",
]
