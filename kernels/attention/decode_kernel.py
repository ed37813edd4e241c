# mypy: ignore-errors
"""Triton: one query row a sequence over paged keys and values, split along the context.

    program (KV head, split, sequence)
    query heads of one KV head are the rows of one tile: [BLOCK_M, BLOCK_D], GROUP of them real

        low's block      split 0      split 1      split 2   context
    keys  |              | share      | share      | rest    |
                                                             ^ IS_NEW: the row's own key

Splits are equal shares of the context as it is on the device, of min_split keys at least: those
that get nothing leave at once, so that the grid can be fixed for every context up to a bound, and
so do those of sequences that don't have one row. The last program of a (sequence, KV head) to
finish merges the partial results, always in order of position; it finds out by an integer counter
that it sets back to zero.

USE_PDL: contexts, pages and positions are read before the launch before has ended. They are of the
step's beginning, two launches before at least, and the launch before has waited for those.

IS_NEW: q and k come as projected. Each program normalises and rotates its queries; the last split
does so with the row's own key, stores key and value in their pages and takes them from registers.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait


@triton.jit(do_not_specialize=["stride_table", "window", "splits", "min_split"])
def decode_kernel(
    p_q,  # [rows, Hq, D]
    p_k,  # [pages, Hkv, PAGE, D], pages stride_page apart
    p_v,
    p_out,  # [rows, Hq, D], contiguous
    p_part,  # float32 [B, Hkv, splits, GROUP, D], contiguous
    p_lse,  # float32 [B, Hkv, splits, GROUP]: base-2 logarithms of the partial sums
    p_count,  # int32 [B, Hkv], zero before and after
    p_offsets,  # int32 [B + 1]
    p_contexts,  # int32 [B]
    p_table,  # int32 [B, Pmax], rows stride_table apart
    p_new_k,  # [rows, Hkv, D]; this one and the following are read with IS_NEW only
    p_new_v,
    p_cos_sin,  # float32 [positions, D]
    p_positions,  # int64 [rows]
    p_pages,  # int32 [rows]
    p_slots,  # int32 [rows]
    p_q_norm,  # [D]
    p_k_norm,
    stride_row,
    stride_head,
    stride_k_row,
    stride_k_head,
    stride_v_row,
    stride_v_head,
    stride_k,
    stride_v,
    stride_table,
    scale,  # times log2(e)
    eps,
    window,
    splits,
    min_split,  # a multiple of BLOCK_N
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    IS_NEW: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_SPLITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    USE_PDL: tl.constexpr,
    ROW_IS_B: tl.constexpr,  # every sequence has one row
):
    head, split, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kv_heads = tl.num_programs(0)
    context = tl.load(p_contexts + b)
    row, rows = b, 1
    if not ROW_IS_B:
        row = tl.load(p_offsets + b)
        rows = tl.load(p_offsets + b + 1) - row
    row = row.to(tl.int64)
    stop = tl.maximum(context - 1, 0) if IS_NEW else context
    low, start = 0, 0
    if HAS_WINDOW:
        low = tl.maximum(context - window, 0)
        start = low // BLOCK_N * BLOCK_N
    share = tl.maximum(tl.cdiv(tl.cdiv(stop - start, splits), BLOCK_N) * BLOCK_N, min_split)
    used = tl.maximum(tl.cdiv(stop - start, share), 1)  # an empty context is one split of zeros
    if (rows != 1) | (split >= used):
        return

    o_m = tl.arange(0, BLOCK_M)
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < DIM
    m_out = (o_m < GROUP)[:, None] & m_d[None, :]
    o_heads = head * GROUP + o_m
    begin = start + split * share
    end = tl.minimum(begin + share, stop)
    p_pages_of = p_table + b.to(tl.int64) * stride_table
    o_n = begin + tl.arange(0, BLOCK_N)
    b_next = tl.load(p_pages_of + o_n // PAGE, mask=(o_n < end) & (o_n >= low), other=0)
    b_peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    b_total = tl.zeros([BLOCK_M], tl.float32)
    b_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    p_q_row = p_q + row * stride_row
    if IS_NEW:
        is_last = split == used - 1
        page = tl.load(p_pages + row).to(tl.int64)
        slot = tl.load(p_slots + row)
        p_angle = p_cos_sin + tl.load(p_positions + row) * DIM
        b_cos, b_sin = _angles(p_angle, o_d, DIM)
        if USE_PDL:
            gdc_wait()
        b_q = _rotated(
            p_q_row + o_heads * stride_head, o_m < GROUP, o_d, b_cos, b_sin, p_q_norm, eps,
            DIM, HAS_NORM,
        )  # fmt: skip
        o_1 = tl.arange(0, 1)
        keys = tl.where(is_last, 1, 0)
        m_new = (o_1 < keys)[:, None] & m_d[None, :]
        b_key = _rotated(
            p_new_k + row * stride_k_row + (head + o_1) * stride_k_head, o_1 < keys, o_d,
            b_cos, b_sin, p_k_norm, eps, DIM, HAS_NORM,
        )  # fmt: skip
        p_value = p_new_v + row * stride_v_row + head * stride_v_head + o_1[:, None] + o_d[None, :]
        b_value = tl.load(p_value, mask=m_new, other=0.0)
        m_new = (o_1 < tl.where(page >= 0, keys, 0))[:, None] & m_d[None, :]
        o_new = (o_1 + head * (PAGE * DIM) + slot * DIM)[:, None] + o_d[None, :]
        tl.store(p_k + page * stride_k + o_new, b_key, mask=m_new)
        tl.store(p_v + page * stride_v + o_new, b_value, mask=m_new)
        b_own = tl.sum(b_q.to(tl.float32) * b_key.to(tl.float32), 1) * scale
        b_peak = tl.where(is_last, b_own, b_peak)
        b_total += tl.where(is_last, 1.0, 0.0)
        b_acc += b_value.to(tl.float32)
    else:
        b_q = tl.load(
            p_q_row + o_heads[:, None] * stride_head + o_d[None, :], mask=m_out, other=0.0
        )

    for n in range(begin, end, BLOCK_N):
        o_n = n + tl.arange(0, BLOCK_N)
        m_n = o_n < end
        if HAS_WINDOW:
            m_n = m_n & (o_n >= low)
        # Pages are read a step ahead, so that keys and values never wait for their addresses.
        b_page = b_next.to(tl.int64)
        b_next = tl.load(p_pages_of + (o_n + BLOCK_N) // PAGE, mask=o_n + BLOCK_N < end, other=0)
        o_token = head * (PAGE * DIM) + (o_n % PAGE) * DIM
        m_kv = m_n[:, None] & m_d[None, :]
        o_k = (b_page * stride_k + o_token)[:, None] + o_d[None, :]
        b_k = tl.load(p_k + o_k, mask=m_kv, other=0.0)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * scale
        b_s = tl.where(m_n[None, :], b_s, float("-inf"))
        b_new = tl.maximum(b_peak, tl.max(b_s, 1))
        b_p = tl.exp2(b_s - b_new[:, None])
        b_fade = tl.exp2(b_peak - b_new)
        b_peak = b_new
        b_total = b_total * b_fade + tl.sum(b_p, 1)
        o_v = (b_page * stride_v + o_token)[:, None] + o_d[None, :]
        b_v = tl.load(p_v + o_v, mask=m_kv, other=0.0)
        b_acc = b_acc * b_fade[:, None]
        b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc, input_precision="ieee")
    b_acc = b_acc / tl.where(b_total == 0.0, 1.0, b_total)[:, None]

    o_out = (row * kv_heads * GROUP + o_heads)[:, None] * DIM + o_d[None, :]
    if not HAS_SPLITS:  # noqa: SIM114 - settled when compiling, unlike the next one
        tl.store(p_out + o_out, b_acc.to(p_out.dtype.element_ty), mask=m_out)
    elif used == 1:
        tl.store(p_out + o_out, b_acc.to(p_out.dtype.element_ty), mask=m_out)
    else:
        pair = b.to(tl.int64) * kv_heads + head
        o_part = (pair * splits + split) * GROUP + o_m
        tl.store(p_part + o_part[:, None] * DIM + o_d[None, :], b_acc, mask=m_out)
        tl.store(p_lse + o_part, b_peak + tl.log2(b_total), mask=o_m < GROUP)
        tl.debug_barrier()  # every thread's part is written before one of them counts
        done = tl.atomic_add(p_count + pair, 1, sem="acq_rel", scope="gpu")
        if done == used - 1:
            first = pair * splits
            b_merged = _merge(
                p_part, p_lse, first, first + used, GROUP, DIM, BLOCK_G, BLOCK_S, BLOCK_D
            )
            o_g = tl.arange(0, BLOCK_G)
            o_merged = row * kv_heads * GROUP + head * GROUP + o_g
            tl.store(
                p_out + o_merged[:, None] * DIM + o_d[None, :],
                b_merged.to(p_out.dtype.element_ty),
                mask=(o_g < GROUP)[:, None] & m_d[None, :],
            )
            tl.store(p_count + pair, 0)


@triton.jit
def _angles(p_angle, o_d, DIM: tl.constexpr):
    """Cosine and signed sine of each dim of a head: x' = x cos + x of the other half * sin."""
    HALF: tl.constexpr = DIM // 2
    o_angle = tl.where(o_d < HALF, o_d, o_d - HALF)
    b_cos = tl.load(p_angle + o_angle, mask=o_d < DIM, other=0.0)
    b_sin = tl.load(p_angle + HALF + o_angle, mask=o_d < DIM, other=0.0)
    return b_cos[None, :], tl.where(o_d < HALF, -b_sin, b_sin)[None, :]


@triton.jit
def _rotated(
    p_heads, m_heads, o_d, b_cos, b_sin, p_norm, eps, DIM: tl.constexpr, HAS_NORM: tl.constexpr
):
    """Heads normalised and rotated, rounded after each of both; zeros outside of the mask."""
    HALF: tl.constexpr = DIM // 2
    dtype = p_heads.dtype.element_ty
    m_d = o_d < DIM
    mask = m_heads[:, None] & m_d[None, :]
    o_other = tl.where(o_d < HALF, o_d + HALF, o_d - HALF)
    b_x = tl.load(p_heads[:, None] + o_d[None, :], mask=mask, other=0.0).to(tl.float32)
    b_y = tl.load(p_heads[:, None] + o_other[None, :], mask=mask, other=0.0).to(tl.float32)
    if HAS_NORM:
        b_factor = tl.rsqrt(tl.sum(b_x * b_x, 1) / DIM + eps)[:, None]
        b_wx = tl.load(p_norm + o_d, mask=m_d, other=0.0).to(tl.float32)[None, :]
        b_wy = tl.load(p_norm + o_other, mask=m_d, other=0.0).to(tl.float32)[None, :]
        b_x = (b_wx * (b_x * b_factor).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
        b_y = (b_wy * (b_y * b_factor).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    return (b_x * b_cos + b_y * b_sin).to(dtype)


@triton.jit
def _merge(
    p_part,
    p_lse,
    first,
    last,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Softmax-weighted mean of the partial results first .. last: [BLOCK_G, BLOCK_D]."""
    o_g = tl.arange(0, BLOCK_G)
    o_d = tl.arange(0, BLOCK_D)
    b_peak = tl.full([BLOCK_G], float("-inf"), tl.float32)
    b_total = tl.zeros([BLOCK_G], tl.float32)
    b_acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for s in range(first, last, BLOCK_S):
        o_s = s + tl.arange(0, BLOCK_S)
        m_s = (o_s < last)[:, None] & (o_g < GROUP)[None, :]
        o_part = o_s[:, None] * GROUP + o_g[None, :]
        # Read from L2: the parts were written by other multiprocessors.
        b_lse = tl.load(p_lse + o_part, mask=m_s, other=float("-inf"), cache_modifier=".cg")
        b_lse = tl.where((o_g < GROUP)[None, :], b_lse, 0.0)  # keeps unused lines from NaN
        b_part = tl.load(
            p_part + o_part[:, :, None] * DIM + o_d[None, None, :],
            mask=m_s[:, :, None] & (o_d < DIM)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        b_new = tl.maximum(b_peak, tl.max(b_lse, 0))
        b_weight = tl.exp2(b_lse - b_new[None, :])
        b_fade = tl.exp2(b_peak - b_new)
        b_peak = b_new
        b_total = b_total * b_fade + tl.sum(b_weight, 0)
        b_acc = b_acc * b_fade[:, None] + tl.sum(b_part * b_weight[:, :, None], 0)
    return b_acc / b_total[:, None]


__all__ = ["decode_kernel"]
