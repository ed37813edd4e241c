"""De-quantisation in Triton, of packed and of canonical shards, exact: code * absmax in float32."""

import triton
import triton.language as tl

from kernels.nf4.gemm_kernel import look_up_plainly


@triton.jit
def expand_packed(
    p_words, p_scales, p_rest, p_code, p_out, rows, columns, padded, blocks, TILES: tl.constexpr
):
    """out [rows, columns]; a program has 16 TILES rows of one block."""
    i_n = tl.program_id(0)
    i_b = tl.program_id(1)
    o_t = i_n * TILES + tl.arange(0, TILES)
    o_word = (o_t.to(tl.int64) * blocks + i_b)[:, None] * 128 + tl.arange(0, 128)[None, :]
    words = tl.reshape(tl.load(p_words + o_word), (TILES, 8, 4, 4))  # T g q o
    n0, n1, n2, n3, n4, n5, n6, n7 = look_up_plainly(words, 0, 0, p_code, tl.float32, False)
    left = tl.join(tl.join(n0, n1), tl.join(n2, n3))  # T g q o b r
    right = tl.join(tl.join(n4, n5), tl.join(n6, n7))
    ordered = tl.permute(tl.join(left, right), (0, 5, 1, 3, 6, 2, 4))  # T r g o h q b
    code = tl.reshape(ordered, (TILES * 16, 64))
    o_n = i_n * TILES * 16 + tl.arange(0, TILES * 16)
    o_row = (o_n // 16) * 16 + (o_n % 8) * 2 + (o_n // 8) % 2
    o_pair = (i_b // 2).to(tl.int64) * padded + o_row
    shift = (i_b % 2) * 16
    high = (tl.load(p_scales + o_pair) >> shift) << 16
    low = ((tl.load(p_rest + o_pair) >> shift) << 16) >> 16  # the sign extends
    absmax = (high + low).to(tl.float32, bitcast=True)
    o_k = i_b * 64 + tl.arange(0, 64)
    p_to = p_out + o_n.to(tl.int64)[:, None] * columns + o_k[None, :]
    value = (code * absmax[:, None]).to(p_out.dtype.element_ty)
    tl.store(p_to, value, mask=(o_n < rows)[:, None] & (o_k < columns)[None, :])


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
