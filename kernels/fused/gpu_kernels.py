# mypy: ignore-errors
"""Triton: norms, gated activation and rotary positions, one launch each.

Arithmetic is in float32 and rounded where the reference rounds.
"""

import triton
import triton.language as tl

from kernels.fused.triton_delta import load_sum
from kernels.triton_overlap import begin


@triton.jit
def norm_kernel(
    p_x,  # line i, of D contiguous elements, at (i // INNER) * stride_outer + (i % INNER) * ...
    p_delta,  # as p_x; read with HAS_DELTA only
    p_residual,  # [lines, D], contiguous
    p_weight,  # [D]
    p_out,  # [lines, D], contiguous
    p_total,  # [lines, D], contiguous
    lines,
    stride_outer,
    stride_inner,
    eps,
    INNER: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    dtype = p_out.dtype.element_ty
    o_l = tl.program_id(0).to(tl.int64) * BLOCK_L + tl.arange(0, BLOCK_L)
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < DIM
    mask = (o_l < lines)[:, None] & m_d[None, :]
    o_x = (o_l // INNER) * stride_outer + (o_l % INNER) * stride_inner
    o_out = o_l[:, None] * DIM + o_d[None, :]
    o_x = o_x[:, None] + o_d[None, :]
    b_weight = tl.load(p_weight + o_d, mask=m_d, other=0.0).to(tl.float32)
    begin(USE_PDL)
    b_x = load_sum(p_x + o_x, p_delta + o_x, mask, HAS_DELTA).to(tl.float32)
    if HAS_RESIDUAL:
        b_residual = tl.load(p_residual + o_out, mask=mask, other=0.0).to(tl.float32)
        b_total = (b_x + b_residual).to(dtype)
        tl.store(p_total + o_out, b_total, mask=mask)
        b_x = b_total.to(tl.float32)
    b_factor = tl.rsqrt(tl.sum(b_x * b_x, 1) / DIM + eps)
    b_normed = (b_x * b_factor[:, None]).to(dtype).to(tl.float32)
    tl.store(p_out + o_out, (b_weight[None, :] * b_normed).to(dtype), mask=mask)


@triton.jit
def silu_mul_kernel(
    p_gate_up,  # [T, 2 * WIDTH], rows stride_row apart
    p_delta,  # as p_gate_up; read with HAS_DELTA only
    p_out,  # [T, WIDTH], contiguous
    stride_row,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    begin(USE_PDL)
    row = tl.program_id(0).to(tl.int64)
    o_i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = o_i < WIDTH
    p_in, p_more = p_gate_up + row * stride_row + o_i, p_delta + row * stride_row + o_i
    b_gate = load_sum(p_in, p_more, mask, HAS_DELTA).to(tl.float32)
    b_up = load_sum(p_in + WIDTH, p_more + WIDTH, mask, HAS_DELTA).to(tl.float32)
    dtype = p_out.dtype.element_ty
    b_active = (b_gate / (1.0 + tl.exp(-b_gate))).to(dtype).to(tl.float32)
    tl.store(p_out + row * WIDTH + o_i, (b_active * b_up).to(dtype), mask=mask)


@triton.jit
def rotary_kernel(
    p_q,  # [T, Hq, D]
    p_k,  # [T, Hkv, D]
    p_q_out,  # [T, Hq, D], contiguous
    p_k_out,  # [T, Hkv, D], contiguous
    p_cos_sin,  # float32 [positions, D]
    p_positions,  # int64 [T]
    stride_q_row,
    stride_q_head,
    stride_k_row,
    stride_k_head,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    Q_BLOCKS: tl.constexpr = (Q_HEADS + BLOCK_H - 1) // BLOCK_H
    HALF: tl.constexpr = DIM // 2
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    o_d = tl.arange(0, BLOCK_HALF)
    m_d = o_d < HALF
    p_angle = p_cos_sin + tl.load(p_positions + row) * DIM + o_d
    b_cos = tl.load(p_angle, mask=m_d, other=0.0)[None, :]
    b_sin = tl.load(p_angle + HALF, mask=m_d, other=0.0)[None, :]
    o_h = tl.arange(0, BLOCK_H)
    if block < Q_BLOCKS:
        o_h += block * BLOCK_H
        mask = (o_h < Q_HEADS)[:, None] & m_d[None, :]
        p_in = p_q + row * stride_q_row + o_h[:, None] * stride_q_head + o_d[None, :]
        p_out = p_q_out + (row * Q_HEADS + o_h)[:, None] * DIM + o_d[None, :]
    else:
        o_h += (block - Q_BLOCKS) * BLOCK_H
        mask = (o_h < K_HEADS)[:, None] & m_d[None, :]
        p_in = p_k + row * stride_k_row + o_h[:, None] * stride_k_head + o_d[None, :]
        p_out = p_k_out + (row * K_HEADS + o_h)[:, None] * DIM + o_d[None, :]
    b_a = tl.load(p_in, mask=mask, other=0.0).to(tl.float32)
    b_b = tl.load(p_in + HALF, mask=mask, other=0.0).to(tl.float32)
    dtype = p_q_out.dtype.element_ty
    tl.store(p_out, (b_a * b_cos - b_b * b_sin).to(dtype), mask=mask)
    tl.store(p_out + HALF, (b_b * b_cos + b_a * b_sin).to(dtype), mask=mask)


__all__ = ["norm_kernel", "rotary_kernel", "silu_mul_kernel"]
