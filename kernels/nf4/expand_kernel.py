# mypy: ignore-errors
"""De-quantisation in Triton, of packed and of canonical shards, exact: code * absmax in float32."""

import triton
import triton.language as tl

from kernels.nf4.gemm_kernel import look_up_plainly, unpack_tiles


@triton.jit
def expand_packed(
    p_words,
    p_scales,
    p_rest,
    p_code,
    p_out,
    rows,
    columns,
    padded,
    blocks,
    TILES: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """out [rows, columns]; a program has 16 TILES rows of PAIRS pairs of blocks."""
    o_t = tl.program_id(1) * TILES + tl.arange(0, TILES)
    p_tile = p_words + (o_t.to(tl.int64) * blocks)[:, None] * 128 + tl.arange(0, 128)[None, :]
    o_n = tl.program_id(1) * TILES * 16 + tl.arange(0, TILES * 16)
    o_row = (o_n // 16) * 16 + (o_n % 8) * 2 + (o_n // 8) % 2
    o_k = tl.arange(0, 64)
    m_n = (o_n < rows)[:, None]
    p_to = p_out + o_n.to(tl.int64)[:, None] * columns + o_k[None, :]
    for pair in tl.static_range(PAIRS):
        i_pair = tl.program_id(0) * PAIRS + pair
        o_scale = i_pair.to(tl.int64) * padded + o_row
        high = tl.load(p_scales + o_scale)
        low = tl.load(p_rest + o_scale)
        for odd in tl.static_range(2):
            i_b = i_pair * 2 + odd
            words = tl.reshape(tl.load(p_tile + i_b * 128), (TILES, 8, 4, 4))  # T g q o
            n0, n1, n2, n3, n4, n5, n6, n7 = look_up_plainly(words, 0, 0, p_code, tl.float32, False)
            left = tl.join(tl.join(n0, n1), tl.join(n2, n3))  # T g q o b r
            right = tl.join(tl.join(n4, n5), tl.join(n6, n7))
            ordered = tl.permute(tl.join(left, right), (0, 5, 1, 3, 6, 2, 4))  # T r g o h q b
            code = tl.reshape(ordered, (TILES * 16, 64))
            shift = 16 * odd
            # The low half is signed: shifting it up and down again extends its sign.
            bits = ((high >> shift) << 16) + (((low >> shift) << 16) >> 16)
            absmax = bits.to(tl.float32, bitcast=True)
            value = (code * absmax[:, None]).to(p_out.dtype.element_ty)
            m_k = (i_b * 64 + o_k < columns)[None, :]
            tl.store(p_to + i_b * 64, value, mask=m_n & m_k)


@triton.jit
def expand_scaled(
    p_words,
    p_scales,
    p_table,
    p_out,
    rows,
    columns,
    padded,
    blocks,
    TILES: tl.constexpr,
    PAIRS: tl.constexpr,
    USE_PRMT: tl.constexpr,
):
    """out [rows, columns] times GAIN, rounded as the product with scaled weights has it."""
    i_n = tl.program_id(1) * TILES
    o_t = i_n + tl.arange(0, TILES)
    p_tile = p_words + (o_t.to(tl.int64) * blocks)[:, None] * 128 + tl.arange(0, 128)[None, :]
    o_lane = tl.arange(0, 8)[:, None, None] * 2 + o_t[None, :, None] * 16 + tl.arange(0, 2)
    p_scale = p_scales + tl.broadcast_to(o_lane[None], (4, 8, TILES, 2))  # q g T r
    o_n = i_n * 16 + tl.arange(0, TILES * 16)
    o_k = tl.arange(0, 128)
    m_n = (o_n < rows)[:, None]
    p_to = p_out + o_n.to(tl.int64)[:, None] * columns + o_k[None, :]
    dtype: tl.constexpr = p_out.dtype.element_ty
    for pair in tl.static_range(PAIRS):
        i_pair = tl.program_id(0) * PAIRS + pair
        both = tl.load(p_scale + i_pair.to(tl.int64) * padded)
        low, high = both & 65535, (both >> 16) & 65535
        words = tl.load(p_tile + i_pair * 256)
        w0 = unpack_tiles(words, low | (low << 16), p_table, dtype, TILES, True, False, USE_PRMT)
        words = tl.load(p_tile + i_pair * 256 + 128)
        w1 = unpack_tiles(words, high | (high << 16), p_table, dtype, TILES, True, False, USE_PRMT)
        value = tl.reshape(tl.permute(tl.join(w0, w1), (0, 2, 1)), (TILES * 16, 128))
        m_k = (i_pair * 128 + o_k < columns)[None, :]
        tl.store(p_to + i_pair * 128, value, mask=m_n & m_k)


@triton.jit
def expand_canonical(
    p_codes,
    p_absmax,
    p_phase,
    p_code,
    p_out,
    columns,
    stride_codes,
    stride_absmax,
    blocksize,
    BK: tl.constexpr,
):
    """out [N, columns]; a program has BK columns of one row."""
    i_n = tl.program_id(0).to(tl.int64)
    o_k = tl.program_id(1) * BK + tl.arange(0, BK)
    m_k = o_k < columns
    packed = tl.load(p_codes + i_n * stride_codes + o_k // 2, mask=m_k, other=0).to(tl.int32)
    code = (packed >> (4 - (o_k % 2) * 4)) & 15
    block = (tl.load(p_phase + i_n) + o_k) // blocksize
    absmax = tl.load(p_absmax + i_n * stride_absmax + block, mask=m_k, other=0.0)
    value = tl.load(p_code + code) * absmax
    tl.store(p_out + i_n * columns + o_k, value.to(p_out.dtype.element_ty), mask=m_k)
