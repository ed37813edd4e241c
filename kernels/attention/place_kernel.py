# mypy: ignore-errors
"""Triton: put keys and values into their pages, with or without norm and rotation on the way.

    program (row, block of BLOCK_H heads); in `rotate_store_kernel` the blocks of a row are
    | query heads | key heads | value heads |

A row whose page is negative is padding: nothing is written for it.
"""

import triton
import triton.language as tl


@triton.jit
def store_kernel(
    p_k,  # [T, Hkv, D]
    p_v,
    p_k_cache,  # [pages, Hkv, PAGE, D], pages stride_*_page apart
    p_v_cache,
    p_pages,  # int32 [T]
    p_slots,  # int32 [T]
    stride_k_row,
    stride_k_head,
    stride_v_row,
    stride_v_head,
    stride_k_page,
    stride_v_page,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    page = tl.load(p_pages + row).to(tl.int64)
    slot = tl.load(p_slots + row)
    o_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    o_d = tl.arange(0, BLOCK_D)
    mask = (o_h < tl.where(page >= 0, HEADS, 0))[:, None] & (o_d < DIM)[None, :]
    o_cache = (o_h * (PAGE * DIM) + slot * DIM)[:, None] + o_d[None, :]
    o_k = row * stride_k_row + o_h[:, None] * stride_k_head + o_d[None, :]
    o_v = row * stride_v_row + o_h[:, None] * stride_v_head + o_d[None, :]
    b_k = tl.load(p_k + o_k, mask=mask)
    b_v = tl.load(p_v + o_v, mask=mask)
    tl.store(p_k_cache + page * stride_k_page + o_cache, b_k, mask=mask)
    tl.store(p_v_cache + page * stride_v_page + o_cache, b_v, mask=mask)


@triton.jit
def rotate_store_kernel(
    p_q,  # [T, Hq, D]
    p_k,  # [T, Hkv, D]
    p_v,
    p_out,  # [T, Hq, D], contiguous
    p_k_cache,  # [pages, Hkv, PAGE, D], pages stride_*_page apart
    p_v_cache,
    p_cos_sin,  # float32 [positions, D]
    p_positions,  # int64 [T]
    p_pages,  # int32 [T]
    p_slots,  # int32 [T]
    p_q_norm,  # [D]
    p_k_norm,
    stride_q_row,
    stride_q_head,
    stride_k_row,
    stride_k_head,
    stride_v_row,
    stride_v_head,
    stride_k_page,
    stride_v_page,
    eps,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    Q_BLOCKS: tl.constexpr = (Q_HEADS + BLOCK_H - 1) // BLOCK_H
    KV_BLOCKS: tl.constexpr = (KV_HEADS + BLOCK_H - 1) // BLOCK_H
    HALF: tl.constexpr = DIM // 2
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    o_d = tl.arange(0, BLOCK_HALF)
    m_d = o_d < HALF
    page = tl.load(p_pages + row).to(tl.int64)
    slot = tl.load(p_slots + row)
    kv_heads = tl.where(page >= 0, KV_HEADS, 0)
    o_h = tl.arange(0, BLOCK_H)
    if block < Q_BLOCKS + KV_BLOCKS:
        p_angle = p_cos_sin + tl.load(p_positions + row) * DIM + o_d
        b_cos = tl.load(p_angle, mask=m_d, other=0.0)[None, :]
        b_sin = tl.load(p_angle + HALF, mask=m_d, other=0.0)[None, :]
        if block < Q_BLOCKS:
            o_h += block * BLOCK_H
            mask = (o_h < Q_HEADS)[:, None] & m_d[None, :]
            p_in = p_q + row * stride_q_row + o_h[:, None] * stride_q_head + o_d[None, :]
            b_a, b_b = _halves(p_in, p_q_norm, mask, o_d, m_d, eps, DIM, HAS_NORM)
            p_to = p_out + (row * Q_HEADS + o_h)[:, None] * DIM + o_d[None, :]
        else:
            o_h += (block - Q_BLOCKS) * BLOCK_H
            mask = (o_h < kv_heads)[:, None] & m_d[None, :]
            p_in = p_k + row * stride_k_row + o_h[:, None] * stride_k_head + o_d[None, :]
            b_a, b_b = _halves(p_in, p_k_norm, mask, o_d, m_d, eps, DIM, HAS_NORM)
            o_cache = page * stride_k_page + slot * DIM + o_h * (PAGE * DIM)
            p_to = p_k_cache + o_cache[:, None] + o_d[None, :]
        b_first = b_a * b_cos - b_b * b_sin
        b_second = b_b * b_cos + b_a * b_sin
        tl.store(p_to, b_first.to(p_out.dtype.element_ty), mask=mask)
        tl.store(p_to + HALF, b_second.to(p_out.dtype.element_ty), mask=mask)
    else:
        o_h += (block - Q_BLOCKS - KV_BLOCKS) * BLOCK_H
        m_v = (o_h < kv_heads)[:, None] & m_d[None, :]
        p_from = p_v + row * stride_v_row + o_h[:, None] * stride_v_head + o_d[None, :]
        o_value = page * stride_v_page + slot * DIM + o_h * (PAGE * DIM)
        p_value = p_v_cache + o_value[:, None] + o_d[None, :]
        tl.store(p_value, tl.load(p_from, mask=m_v), mask=m_v)
        tl.store(p_value + HALF, tl.load(p_from + HALF, mask=m_v), mask=m_v)


@triton.jit
def _halves(
    p_in,
    p_norm,
    mask,
    o_d,
    m_d,
    eps,
    DIM: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """Both halves of some heads in float32, normalised and rounded as the norm alone would."""
    dtype = p_in.dtype.element_ty
    b_a = tl.load(p_in, mask=mask, other=0.0).to(tl.float32)
    b_b = tl.load(p_in + DIM // 2, mask=mask, other=0.0).to(tl.float32)
    if HAS_NORM:
        b_factor = tl.rsqrt(tl.sum(b_a * b_a + b_b * b_b, 1) / DIM + eps)[:, None]
        b_wa = tl.load(p_norm + o_d, mask=m_d, other=0.0).to(tl.float32)[None, :]
        b_wb = tl.load(p_norm + DIM // 2 + o_d, mask=m_d, other=0.0).to(tl.float32)[None, :]
        b_a = (b_wa * (b_a * b_factor).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
        b_b = (b_wb * (b_b * b_factor).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    return b_a, b_b


__all__ = ["rotate_store_kernel", "store_kernel"]
