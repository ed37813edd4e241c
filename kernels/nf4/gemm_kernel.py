# mypy: ignore-errors
"""The NF4 product in Triton: Y^T = W X^T, weights unpacked straight into tensor core fragments.

Legend: a program has TILES tiles of 16 output features and BM rows of x, and adds up 64-column
blocks, BLOCKS a step, over its part of the columns. See `packed.py` for the words.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from kernels.nf4.codebook import ASSEMBLY, ASSEMBLY_SCALED, GAIN, LOAD_TABLE

_ASSEMBLY = tl.constexpr(ASSEMBLY)
_ASSEMBLY_SCALED = tl.constexpr(ASSEMBLY_SCALED)
_GAIN = tl.constexpr(GAIN)
_LOAD_TABLE = tl.constexpr(LOAD_TABLE)


@triton.jit
def look_up(words, scale0, scale1, p_table, SCALED: tl.constexpr):
    """Return the eight bfloat16 values of each word, lowest bits first, times GAIN.

    With SCALED, times `scale0` or `scale1` too: two bfloat16 of one value in an int32.
    """
    t0, t1, t2, t3, t4 = tl.inline_asm_elementwise(
        _LOAD_TABLE,
        "=r,=r,=r,=r,=r,l",
        [p_table.to(tl.int64)],
        dtype=(tl.int32,) * 5,
        is_pure=True,
        pack=1,
    )
    if SCALED:
        return tl.inline_asm_elementwise(
            _ASSEMBLY_SCALED,
            "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r,r,r,r,r,r",
            [words, t0, t1, t2, t3, t4, scale0, scale1],
            dtype=(tl.bfloat16,) * 8,
            is_pure=True,
            pack=1,
        )
    return tl.inline_asm_elementwise(
        _ASSEMBLY,
        "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r,r,r,r",
        [words, t0, t1, t2, t3, t4],
        dtype=(tl.bfloat16,) * 8,
        is_pure=True,
        pack=1,
    )


@triton.jit
def look_up_plainly(words, scale0, scale1, p_values, dtype: tl.constexpr, SCALED: tl.constexpr):
    """`look_up` for any dtype and without assembly, from a float32 table in memory."""
    n0 = tl.load(p_values + (words & 15)).to(dtype)
    n1 = tl.load(p_values + ((words >> 4) & 15)).to(dtype)
    n2 = tl.load(p_values + ((words >> 8) & 15)).to(dtype)
    n3 = tl.load(p_values + ((words >> 12) & 15)).to(dtype)
    n4 = tl.load(p_values + ((words >> 16) & 15)).to(dtype)
    n5 = tl.load(p_values + ((words >> 20) & 15)).to(dtype)
    n6 = tl.load(p_values + ((words >> 24) & 15)).to(dtype)
    n7 = tl.load(p_values + ((words >> 28) & 15)).to(dtype)
    if SCALED:
        s0 = (scale0 & -65536).to(tl.float32, bitcast=True).to(dtype)
        s1 = (scale1 & -65536).to(tl.float32, bitcast=True).to(dtype)
        return n0 * s0, n1 * s0, n2 * s1, n3 * s1, n4 * s0, n5 * s0, n6 * s1, n7 * s1
    return n0, n1, n2, n3, n4, n5, n6, n7


@triton.jit
def unpack_tiles(
    words,
    scales,
    p_table,
    dtype: tl.constexpr,
    TILES: tl.constexpr,
    SCALED: tl.constexpr,
    QUADS: tl.constexpr,
    USE_PRMT: tl.constexpr,
):
    """[TILES, 128] words of one block -> [16 TILES, 64] values, all in the lanes they are in.

    `scales` as for `spread_scales`, two bfloat16 of one value in an int32; read with SCALED only.
    With QUADS the columns are in the order of `quad_order`.
    """
    fragments = tl.reshape(words, (TILES, 8, 4, 2, 2))  # T g q o1 o0
    scale0, scale1 = tl.split(tl.permute(scales, (2, 1, 0, 3)))  # T g q
    scale0 = scale0[:, :, :, None, None]
    scale1 = scale1[:, :, :, None, None]
    if USE_PRMT:
        n0, n1, n2, n3, n4, n5, n6, n7 = look_up(fragments, scale0, scale1, p_table, SCALED)
    else:
        n0, n1, n2, n3, n4, n5, n6, n7 = look_up_plainly(
            fragments, scale0, scale1, p_table, dtype, SCALED
        )
    left = tl.join(tl.join(n0, n1), tl.join(n2, n3))  # T g q o1 o0 b r
    right = tl.join(tl.join(n4, n5), tl.join(n6, n7))
    every = tl.join(left, right)  # T g q o1 o0 b r h
    if QUADS:
        ordered = tl.permute(every, (0, 6, 1, 3, 7, 2, 4, 5))  # T r g o1 h q o0 b
    else:
        ordered = tl.permute(every, (0, 6, 1, 3, 4, 7, 2, 5))  # T r g o1 o0 h q b
    return tl.reshape(ordered, (TILES * 16, 64))


@triton.jit
def quad_order(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """[ROWS, COLUMNS] with the four columns side by side that a lane takes from 32 for `mma.sync`.

    That is how a `tl.dot` by `mma.sync` is laid out when its operand passes through `tl.join`: 16
    columns a step, but columns 4 q and 4 q + 1 of both halves of 32 first, then the next two. With
    `wgmma` the order is natural.
    """
    columns = tl.reshape(x, (ROWS, COLUMNS // 32, 2, 2, 4, 2))  # m o1 o0 h q b
    return tl.reshape(tl.permute(columns, (0, 1, 3, 4, 2, 5)), (ROWS, COLUMNS))


@triton.jit
def ways_first(rows, TILES: tl.constexpr, WAYS: tl.constexpr, COLUMNS: tl.constexpr):
    """[16 TILES * WAYS, COLUMNS], a way's tiles WAYS apart -> [WAYS, 16 TILES, COLUMNS]."""
    apart = tl.reshape(rows, (TILES, WAYS, 16, COLUMNS))
    return tl.reshape(tl.permute(apart, (1, 0, 2, 3)), (WAYS, TILES * 16, COLUMNS))


@triton.jit
def spread_scales(scales, TILES: tl.constexpr, COLUMNS: tl.constexpr):
    """[4, 8, TILES, 2] (q g T r), equal along q -> [16 TILES, COLUMNS], equal along columns.

    The lanes of a quad hold one row of both operands and accumulators: nothing moves.
    """
    rows = tl.permute(scales, (2, 3, 1, 0))[:, :, :, None, :, None]  # T r g . q .
    wide = tl.broadcast_to(rows, (TILES, 2, 8, COLUMNS // 8, 4, 2))
    return tl.reshape(wide, (TILES * 16, COLUMNS))


@triton.jit(do_not_specialize=["rows", "steps"])
def nf4_gemm(
    p_x,
    p_words,
    p_scales,
    p_table,
    p_bias,
    p_y,
    p_partial,
    p_arrived,
    rows,
    features,
    columns,
    padded,
    stride_x,
    steps,
    TILES: tl.constexpr,
    BM: tl.constexpr,
    BLOCKS: tl.constexpr,
    SPLIT: tl.constexpr,
    WAYS: tl.constexpr,
    STAGES: tl.constexpr,
    QUADS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN_COLUMNS: tl.constexpr,
    SCALE_WEIGHTS: tl.constexpr,
    USE_PRMT: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """y [rows, features] = x [rows, columns] W^T + bias.

    With SCALE_WEIGHTS, weights are scaled before the product (cheaper for many rows); otherwise
    each block's partial sums are (cheaper for few, and rounded less). The columns of a step are
    dealt to WAYS groups of warps, whose sums are added at the end. With SPLIT > 1 the steps are
    dealt to SPLIT programs; the last one to arrive adds all partial sums, in order.
    """
    BN: tl.constexpr = TILES * 16
    PAIRS: tl.constexpr = (BLOCKS + 1) // 2  # words of scales, each of two blocks
    NEAR: tl.constexpr = 2 if BLOCKS > 1 else 1  # blocks of such a word in one step
    WIDTH: tl.constexpr = NEAR if SCALE_WEIGHTS else 1  # blocks a product
    i_m = tl.program_id(0)  # programs of the same weights run side by side
    i_n = tl.program_id(1)
    i_k = tl.program_id(2)
    o_n = i_n * BN + tl.arange(0, BN)
    o_m = i_m * BM + tl.arange(0, BM)
    o_k = tl.arange(0, WIDTH * 64)
    begin = (steps * i_k) // SPLIT
    end = (steps * (i_k + 1)) // SPLIT
    wide = tl.cast(padded, tl.int64)
    i_t = tl.arange(0, WAYS * TILES)
    o_t = i_n * TILES + i_t // WAYS
    o_word = o_t.to(tl.int64) * (steps * BLOCKS * WAYS * 128) + (i_t % WAYS) * (BLOCKS * 128)
    p_tile = p_words + o_word[:, None] + tl.arange(0, 128)[None]
    o_scale = o_t * 16 + (i_t % WAYS) * PAIRS * wide
    o_lane = tl.arange(0, 8)[:, None, None] * 2 + tl.arange(0, 2)  # g . r
    o_lane = tl.broadcast_to((o_scale[None, :, None] + o_lane)[None], (4, 8, WAYS * TILES, 2))
    p_scale = p_scales + o_lane  # q g T r
    i_x = tl.arange(0, WAYS * BM)
    o_x = i_m * BM + i_x % BM
    o_way = (i_x // BM) * (BLOCKS * 64)
    m_m = o_x < rows
    p_rows = p_x + (o_x.to(tl.int64) * stride_x + o_way)[:, None] + o_k[None, :]
    if WAYS > 1:
        acc = tl.zeros((WAYS, BN, BM), dtype=tl.float32)
    else:
        acc = tl.zeros((BN, BM), dtype=tl.float32)
    if USE_PDL:
        gdc_wait()  # x and the workspace may still be in use by the kernel before
    for step in tl.range(begin, end, num_stages=STAGES):
        for pair in tl.static_range(PAIRS):
            o_pair = (step * BLOCKS * WAYS) // 2 + pair
            both = tl.load(p_scale + o_pair * wide)  # [4, 8, WAYS * TILES, 2]
            for odd in tl.static_range(0, NEAR, WIDTH):
                o_block = step * BLOCKS * WAYS + pair * 2 + odd
                p_block = p_tile + o_block * 128
                if EVEN_COLUMNS:
                    x = tl.load(p_rows + o_block * 64, mask=m_m[:, None], other=0.0)
                else:
                    m_k = (o_block * 64 + o_way)[:, None] + o_k[None, :] < columns
                    x = tl.load(p_rows + o_block * 64, mask=m_m[:, None] & m_k, other=0.0)
                if QUADS:
                    x = quad_order(x, WAYS * BM, WIDTH * 64)
                if NEAR == 2:
                    bits = both & -65536 if odd else both << 16
                else:
                    bits = (both >> ((step % 2) * 16)) << 16
                w = unpack_tiles(
                    tl.load(p_block),
                    bits | ((bits >> 16) & 65535),
                    p_table,
                    x.dtype,
                    WAYS * TILES,
                    SCALE_WEIGHTS,
                    QUADS,
                    USE_PRMT,
                )
                if WIDTH == 2:
                    bits = both & -65536
                    right = unpack_tiles(
                        tl.load(p_block + 128),
                        bits | ((bits >> 16) & 65535),
                        p_table,
                        x.dtype,
                        WAYS * TILES,
                        SCALE_WEIGHTS,
                        QUADS,
                        USE_PRMT,
                    )
                    w = tl.permute(tl.join(w, right), (0, 2, 1))
                    w = tl.reshape(w, (WAYS * BN, 128))
                if WAYS > 1:
                    x = tl.permute(tl.reshape(x, (WAYS, BM, WIDTH * 64)), (0, 2, 1))
                    w = ways_first(w, TILES, WAYS, WIDTH * 64)
                else:
                    x = tl.trans(x)
                if SCALE_WEIGHTS:
                    acc = tl.dot(w, x, acc)
                else:
                    scale = bits.to(tl.float32, bitcast=True)
                    spread = spread_scales(scale, WAYS * TILES, BM)
                    if WAYS > 1:
                        spread = ways_first(spread, TILES, WAYS, BM)
                    acc += tl.dot(w, x) * spread
    if WAYS > 1:
        acc = tl.sum(acc, axis=0)
    m_m = o_m < rows
    m_n = o_n < features
    last = True
    if SPLIT > 1:
        i_tile = i_n * tl.num_programs(0) + i_m
        o_part = tl.arange(0, BM)[None, :] * BN + tl.arange(0, BN)[:, None]
        p_first = p_partial + i_tile.to(tl.int64) * (SPLIT * BN * BM) + o_part
        tl.store(p_first + i_k * (BN * BM), acc)
        tl.debug_barrier()  # every thread's part is written before this program counts as arrived
        last = tl.atomic_add(p_arrived + i_tile, 1, sem="acq_rel") == SPLIT - 1
    if last:
        if SPLIT > 1:
            acc = tl.load(p_first, cache_modifier=".cg")
            for part in tl.static_range(1, SPLIT):
                acc += tl.load(p_first + part * (BN * BM), cache_modifier=".cg")
            tl.store(p_arrived + i_tile, 0)  # as the next launch expects it
        acc = acc * (1.0 / _GAIN)
        if HAS_BIAS:
            acc += tl.load(p_bias + o_n, mask=m_n, other=0.0).to(tl.float32)[:, None]
        p_out = p_y + o_m.to(tl.int64)[None, :] * features + o_n[:, None]
        tl.store(p_out, acc.to(p_y.dtype.element_ty), mask=m_n[:, None] & m_m[None, :])
