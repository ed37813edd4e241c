# mypy: ignore-errors
"""Triton: one query row a sequence over paged keys and values, split along the context.

    program (KV head, split, sequence)
    split s = the keys at absolute positions s * split_keys .. (s + 1) * split_keys
    query heads of one KV head are the rows of one tile: [BLOCK_M, BLOCK_D], GROUP of them real

A program with no key to see leaves at once, so that the grid can be fixed by an upper bound of the
contexts; so do those of sequences that don't have one row. The last program of a (sequence, KV
head) to finish merges the partial results, always in order of position; it finds out by an integer
counter that it sets back to zero.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["stride_table", "window", "splits", "split_keys"])
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
    stride_row,
    stride_head,
    stride_k,
    stride_v,
    stride_table,
    scale,  # times log2(e)
    window,
    splits,
    split_keys,  # a multiple of BLOCK_N
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    HAS_SPLITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
):
    head, split, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kv_heads = tl.num_programs(0)
    context = tl.load(p_contexts + b)
    row = tl.load(p_offsets + b)
    rows = tl.load(p_offsets + b + 1) - row
    low = 0
    if HAS_WINDOW:
        low = tl.maximum(context - window, 0)
    first = low // split_keys
    last = tl.maximum(tl.cdiv(context, split_keys), 1)  # an empty context is one split of zeros
    if (rows != 1) | (split < first) | (split >= last):
        return

    o_m = tl.arange(0, BLOCK_M)
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < DIM
    m_out = (o_m < GROUP)[:, None] & m_d[None, :]
    o_heads = head * GROUP + o_m
    o_q = row.to(tl.int64) * stride_row + o_heads[:, None] * stride_head + o_d[None, :]
    b_q = tl.load(p_q + o_q, mask=m_out, other=0.0)

    b_peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    b_total = tl.zeros([BLOCK_M], tl.float32)
    b_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    begin = tl.maximum(split * split_keys, low // BLOCK_N * BLOCK_N)
    end = tl.minimum((split + 1) * split_keys, context)
    p_pages = p_table + b.to(tl.int64) * stride_table
    o_n = begin + tl.arange(0, BLOCK_N)
    b_next = tl.load(p_pages + o_n // PAGE, mask=(o_n < end) & (o_n >= low), other=0)
    for n in range(begin, end, BLOCK_N):
        o_n = n + tl.arange(0, BLOCK_N)
        m_n = o_n < end
        if HAS_WINDOW:
            m_n = m_n & (o_n >= low)
        # Pages are read a step ahead, so that keys and values never wait for their addresses.
        b_page = b_next.to(tl.int64)
        b_next = tl.load(p_pages + (o_n + BLOCK_N) // PAGE, mask=o_n + BLOCK_N < end, other=0)
        o_token = head * (PAGE * DIM) + (o_n % PAGE) * DIM
        m_kv = m_n[:, None] & m_d[None, :]
        o_k = (b_page * stride_k + o_token)[:, None] + o_d[None, :]
        b_k = tl.load(p_k + o_k, mask=m_kv, other=0.0)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * scale
        b_s = tl.where(m_n[None, :], b_s, float("-inf"))
        b_new = tl.maximum(b_peak, tl.max(b_s, 1))
        b_p = tl.exp2(b_s - b_new[:, None])
        b_fade = tl.exp2(b_peak - b_new)
        b_peak = b_new
        b_total = b_total * b_fade + tl.sum(b_p, 1)
        o_v = (b_page * stride_v + o_token)[:, None] + o_d[None, :]
        b_v = tl.load(p_v + o_v, mask=m_kv, other=0.0)
        b_acc = b_acc * b_fade[:, None]
        b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc, input_precision=PRECISION)
    b_acc = b_acc / tl.where(b_total == 0.0, 1.0, b_total)[:, None]

    o_out = (row.to(tl.int64) * kv_heads * GROUP + o_heads)[:, None] * DIM + o_d[None, :]
    if not HAS_SPLITS:  # noqa: SIM114 - settled when compiling, unlike the next one
        tl.store(p_out + o_out, b_acc.to(p_out.dtype.element_ty), mask=m_out)
    elif last - first == 1:
        tl.store(p_out + o_out, b_acc.to(p_out.dtype.element_ty), mask=m_out)
    else:
        pair = b.to(tl.int64) * kv_heads + head
        o_part = (pair * splits + split) * GROUP + o_m
        tl.store(p_part + o_part[:, None] * DIM + o_d[None, :], b_acc, mask=m_out)
        tl.store(p_lse + o_part, b_peak + tl.log2(b_total), mask=o_m < GROUP)
        tl.debug_barrier()  # every thread's part is written before one of them counts
        done = tl.atomic_add(p_count + pair, 1, sem="acq_rel", scope="gpu")
        if done == last - first - 1:
            p_first = pair * splits
            b_merged = _merge(
                p_part, p_lse, p_first + first, p_first + last,
                GROUP, DIM, BLOCK_G, BLOCK_S, BLOCK_D,
            )  # fmt: skip
            o_g = tl.arange(0, BLOCK_G)
            o_merged = row.to(tl.int64) * kv_heads * GROUP + head * GROUP + o_g
            tl.store(
                p_out + o_merged[:, None] * DIM + o_d[None, :],
                b_merged.to(p_out.dtype.element_ty),
                mask=(o_g < GROUP)[:, None] & m_d[None, :],
            )
            tl.store(p_count + pair, 0)


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
