"""PTX: the 16 NF4 values looked up in shared memory, two weights at a time.

Triton has no look-up by lane in shared memory, so this declares an array of its own there, beside
what Triton allocates. It has a row of 128 bytes for each of the 256 bytes that two codes can make:
their two bfloat16 values, 32 times, so that every lane finds them in its own bank and no two lanes
ever meet. A word of eight weights takes four shifts, four selections and four loads; by byte
permutations (`codebook.ASSEMBLY`) it takes 19 instructions, of which 17 share one pipe. A product
uses what it looked up at once, in registers that no other layout asks to be moved.
"""

LUT_BYTES = 256 * 128
"""Shared memory of the array; it is not in what Triton reports."""


def fill(threads: int) -> str:
    """Return PTX that fills the array and waits for all threads; $0 becomes 4 * lane.

    $1 is the address of `tables.pair_table`. `threads` a program, a power of two from 32 on. A
    lane's stores go round the eight places of a row, beginning at its own, so that none meet in a
    bank.
    """
    entries, stores = max(1, 256 // threads), min(8, 2048 // threads)
    lines = [
        f".shared .align 128 .b8 nf4_lut[{LUT_BYTES}];",
        "{",
        ".reg .b32 t, e, first, place, at, row, v;",
        ".reg .b64 from;",
        "mov.u32 t, %tid.x;",
        "mov.u32 first, %laneid;",
        "mov.u32 row, nf4_lut;",
        "and.b32 e, t, 255;",
        "mad.wide.u32 from, e, 4, $1;",
        "mad.lo.u32 row, e, 128, row;",
        "shr.u32 t, t, 8;",
        f"mad.lo.u32 first, t, {stores}, first;",
    ]
    for entry in range(entries):
        lines += [f"ld.global.nc.b32 v, [from + {entry * threads * 4}];"]
        for store in range(stores):
            lines += [
                f"add.u32 place, first, {store};",
                "and.b32 place, place, 7;",
                "mad.lo.u32 at, place, 16, row;",
                f"st.shared.v4.b32 [at + {entry * threads * 128}], {{v, v, v, v}};",
            ]
    lines += ["bar.sync 0;", "mov.u32 $0, %laneid;", "shl.b32 $0, $0, 2;", "}"]
    return "\n".join(lines)


def product(tiles: int) -> str:
    """Return PTX: one block of 64 columns of 16 features times 8 or, with 2 `tiles`, 16 rows of x.

    Registers, 4 a group: the sums of each 8 rows; a lane's words of a tile; what `fill` gave (four
    times); then for each 8 rows, in two groups, x at columns 16 o + 8 h + 2 q and the next, h
    before o. The sums are where the tensor cores hold them: features g, g, g + 8, g + 8 and rows
    2 q, 2 q + 1, 2 q, 2 q + 1.
    """
    words, lane = 4 * tiles, 4 * tiles + 4
    shifts = ("shl.b32 at, {}, 7;", *(f"shr.u32 at, {{}}, {bits};" for bits in (1, 9, 17)))
    lines = [
        "{",
        ".reg .b32 at, lut, a0, a1, a2, a3;",
        ".reg .f32 zero;",
        "mov.u32 lut, nf4_lut;",
        "mov.f32 zero, 0f00000000;",
    ]
    for o in range(4):
        for byte, shift in enumerate(shifts):
            lines += [
                shift.format(f"${words + o}"),
                f"lop3.b32 at, at, 0x7f80, ${lane}, 0xea;",  # (at & 0x7f80) | lane
                "add.u32 at, at, lut;",
                f"ld.shared.b32 a{byte}, [at];",
            ]
        for tile in range(tiles):
            x = lane + 4 + 8 * tile + 2 * o
            sums = ", ".join(f"${4 * tile + i}" for i in range(4))
            lines += [
                "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                f"{{{sums}}}, {{a0, a1, a2, a3}}, {{${x}, ${x + 1}}}, "
                f"{{{sums if o else 'zero, zero, zero, zero'}}};"
            ]
    return "\n".join([*lines, "}"])


__all__ = ["LUT_BYTES", "fill", "product"]
