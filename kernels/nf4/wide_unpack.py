# mypy: ignore-errors
"""NF4 words in shared memory to an operand of the tensor cores in registers, in Gluon.

Two ways: by permutations of bytes as in `gemm_kernel.py`, 23 instructions for eight weights, 17 of
them for one pipe; or by a table of pairs of values in shared memory, four bytes of codes to four
loads: 16 instructions, 4 of them for that pipe. Every lane reads a copy in a bank of its own.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.gluon_names import barrier
from kernels.nf4.codebook import ASSEMBLY_SCALED, LOAD_TABLE

_ASSEMBLY = gl.constexpr(ASSEMBLY_SCALED)
_LOAD_TABLE = gl.constexpr(LOAD_TABLE)
# The table is not of Gluon's making, whose addresses Triton 3.6 doesn't give to assembly.
_ADDRESS = gl.constexpr(
    """{
    .shared .align 1024 .b8 nf4_pairs[32768];
    mov.u32 $0, nf4_pairs;
    }"""
)
# 32 copies of $2 at entry $1, by lanes that start at different banks.
_FILL = gl.constexpr(
    """{
    .reg .b32 at, turn, lane;
    mov.u32 lane, %laneid;
    mad.lo.u32 at, $1, 128, $3;
    """
    + "".join(
        f"""add.u32 turn, lane, {i};
    and.b32 turn, turn, 7;
    mad.lo.u32 turn, turn, 16, at;
    st.shared.v4.b32 [turn], {{$2, $2, $2, $2}};
    """
        for i in range(8)
    )
    + """mov.b32 $0, 0;
    }"""
)
# After the barrier, for all that reads the table depends on this address.
_OWN = gl.constexpr(
    """{
    .reg .b32 lane;
    mov.u32 lane, %laneid;
    mad.lo.u32 $0, lane, 4, $1;
    }"""
)
_FROM_SHARED = gl.constexpr(
    "{\n.reg .b32 t, p, z;\nmov.b32 z, 0x80008000;\n"
    + "".join(
        f"""prmt.b32 t, $8, 0, 0x444{i};
    mad.lo.u32 t, t, 128, $9;
    ld.shared.b32 p, [t];
    fma.rn.bf16x2 p, p, ${10 + i % 2}, z;
    mov.b32 {{${2 * i}, ${2 * i + 1}}}, p;
    """
        for i in range(4)
    )
    + "}"
)


@gluon.jit
def fill_table(p_pairs):
    """Spread the values of all bytes over shared memory, a copy a bank; return this lane's."""
    W: gl.constexpr = gl.num_warps()
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [W], [0])
    address = gl.inline_asm_elementwise(_ADDRESS, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    byte = gl.arange(0, 256, layout=layout)
    pairs = gl.load(p_pairs + byte)
    gl.inline_asm_elementwise(
        _FILL, "=r,r,r,r", [byte, pairs, address], dtype=gl.int32, is_pure=False, pack=1
    )
    barrier()
    return gl.inline_asm_elementwise(_OWN, "=r,r", [address], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def look_up(words, scale0, scale1, table, USE_SHARED: gl.constexpr):
    """Return the eight bfloat16 values of each word, lowest bits first, times GAIN and a scale.

    `scale0` and `scale1` as in `gemm_kernel.look_up`.
    """
    if USE_SHARED:
        return gl.inline_asm_elementwise(
            _FROM_SHARED,
            "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r,r",
            [words, table, scale0, scale1],
            dtype=(gl.bfloat16,) * 8,
            is_pure=True,
            pack=1,
        )
    t0, t1, t2, t3, t4 = gl.inline_asm_elementwise(
        _LOAD_TABLE,
        "=r,=r,=r,=r,=r,l",
        [table.to(gl.int64)],
        dtype=(gl.int32,) * 5,
        is_pure=True,
        pack=1,
    )
    return gl.inline_asm_elementwise(
        _ASSEMBLY,
        "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r,r,r,r,r,r",
        [words, t0, t1, t2, t3, t4, scale0, scale1],
        dtype=(gl.bfloat16,) * 8,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def unpack_block(words, scales, table, USE_SHARED: gl.constexpr):
    """[TILES, 128] words, [TILES, 8, 2] scales (T g r) -> [16 TILES, 64], in the lanes they are in.

    `scales` hold two bfloat16 of one value in an int32.
    """
    TILES: gl.constexpr = words.shape[0]
    fragments = gl.reshape(words, (TILES, 8, 4, 4))  # T g q o
    o_row: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, fragments.type.layout))
    scale0, scale1 = gl.split(scales)
    scale0 = gl.convert_layout(scale0, o_row, assert_trivial=True)[:, :, None, None]
    scale1 = gl.convert_layout(scale1, o_row, assert_trivial=True)[:, :, None, None]
    n0, n1, n2, n3, n4, n5, n6, n7 = look_up(fragments, scale0, scale1, table, USE_SHARED)
    left = gl.join(gl.join(n0, n1), gl.join(n2, n3))  # T g q o b r
    right = gl.join(gl.join(n4, n5), gl.join(n6, n7))
    every = gl.join(left, right)  # T g q o b r h
    ordered = gl.permute(every, (0, 5, 1, 3, 6, 2, 4))  # T r g o h q b
    return gl.reshape(ordered, (TILES * 16, 64))


@gluon.jit
def unpack_step(
    words, scales, table, odd: gl.constexpr, layout: gl.constexpr, USE_SHARED: gl.constexpr
):
    """[TILES, 128 BLOCKS] words of a step -> [16 TILES, 64 BLOCKS] values in `layout`.

    `scales` [1, 16 TILES]: of two blocks, of which a step of one block takes that of `odd`.
    """
    TILES: gl.constexpr = words.shape[0]
    W: gl.constexpr = gl.num_warps()
    o_words: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [W, 1], [1, 0])
    o_scales: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 1]] if TILES == W else [[0, 1], [0, 16 * W]],
        lane_bases=[[0, 0], [0, 0], [0, 2], [0, 4], [0, 8]],
        warp_bases=[[0, 16], [0, 32], [0, 64]] if W == 8 else [[0, 16], [0, 32]],
        block_bases=[],
        shape=[1, 16 * TILES],
    )
    both = gl.reshape(scales.load(o_scales), (TILES, 8, 2))
    low = both << 16
    low = low | ((low >> 16) & 65535)
    high = both & -65536
    high = high | ((high >> 16) & 65535)
    if words.shape[1] == 128:
        w = unpack_block(words.load(o_words), high if odd else low, table, USE_SHARED)
    else:
        w0 = unpack_block(words.slice(0, 128, 1).load(o_words), low, table, USE_SHARED)
        w1 = unpack_block(words.slice(128, 128, 1).load(o_words), high, table, USE_SHARED)
        w = gl.reshape(gl.permute(gl.join(w0, w1), (0, 2, 1)), (16 * TILES, 128))
    return gl.convert_layout(w, layout, assert_trivial=True)
