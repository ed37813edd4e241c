# mypy: ignore-errors
"""Triton: chunks of query rows over paged keys and values, causal, with a cached prefix.

    program (tile, KV head)
    tile = ROWS query rows of one sequence x GROUP heads of one KV head, packed in BLOCK_M lines
    tiles of sequence b: query_offsets[b] // ROWS + b and on; some at the ends have no rows

        begin          free_begin           free_end          end
    keys  | window's edge  | seen by all rows   | causal edge   |
            masked           no mask              masked

Tiles are taken from the last: in each sequence those with the most keys come first.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["stride_table", "window", "sequences"])
def prefill_kernel(
    p_q,  # [T, Hq, D]
    p_k,  # [pages, Hkv, PAGE, D], pages stride_page apart
    p_v,
    p_out,  # [T, Hq, D], contiguous
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
    sequences,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_B: tl.constexpr,
    HAS_DECODES: tl.constexpr,  # sequences of one row are left to the decode kernel
    HAS_WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
):
    ROWS: tl.constexpr = BLOCK_M // GROUP
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    o_b = tl.arange(0, BLOCK_B)
    b_first = tl.load(p_offsets + o_b, mask=o_b < sequences, other=0) // ROWS + o_b
    b = tl.sum(((o_b < sequences) & (b_first <= tile)).to(tl.int32), 0) - 1
    start = tl.load(p_offsets + b)
    rows = tl.load(p_offsets + b + 1) - start
    row = (tile - start // ROWS - b) * ROWS
    if row >= rows:
        return
    if HAS_DECODES:  # noqa: SIM102 - settled when compiling, unlike the next one
        if rows == 1:
            return
    context = tl.load(p_contexts + b)

    o_m = tl.arange(0, BLOCK_M)
    o_d = tl.arange(0, BLOCK_D)
    o_row = row + o_m // GROUP
    m_m = (o_row < rows) & (o_m < ROWS * GROUP)
    m_out = m_m[:, None] & (o_d < DIM)[None, :]
    o_heads = head * GROUP + o_m % GROUP
    o_line = (start + o_row).to(tl.int64)
    o_q = (o_line * stride_row + o_heads * stride_head)[:, None] + o_d[None, :]
    b_q = tl.load(p_q + o_q, mask=m_out, other=0.0)

    b_position = context - rows + o_row
    earliest = context - rows + row
    end = tl.minimum(earliest + ROWS, context)
    low, begin, free_begin = 0, 0, 0
    if HAS_WINDOW:
        low = tl.maximum(earliest - window + 1, 0)
        begin = low // BLOCK_N * BLOCK_N
        free_begin = tl.maximum(tl.cdiv(end - window, BLOCK_N) * BLOCK_N, begin)
    free_end = tl.maximum((earliest + 1) // BLOCK_N * BLOCK_N, free_begin)

    p_pages = p_table + b.to(tl.int64) * stride_table
    o_k = head * (PAGE * DIM)
    b_peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    b_total = tl.zeros([BLOCK_M], tl.float32)
    b_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if HAS_WINDOW:
        b_acc, b_peak, b_total = _attend(
            b_acc, b_peak, b_total, b_q, b_position, begin, tl.minimum(free_begin, end), low, end,
            p_k + o_k, p_v + o_k, p_pages, stride_k, stride_v, scale, window,
            DIM, PAGE, BLOCK_N, BLOCK_D, True, True, PRECISION,
        )  # fmt: skip
    b_acc, b_peak, b_total = _attend(
        b_acc, b_peak, b_total, b_q, b_position, free_begin, free_end, low, end,
        p_k + o_k, p_v + o_k, p_pages, stride_k, stride_v, scale, window,
        DIM, PAGE, BLOCK_N, BLOCK_D, False, HAS_WINDOW, PRECISION,
    )  # fmt: skip
    b_acc, b_peak, b_total = _attend(
        b_acc, b_peak, b_total, b_q, b_position, free_end, end, low, end,
        p_k + o_k, p_v + o_k, p_pages, stride_k, stride_v, scale, window,
        DIM, PAGE, BLOCK_N, BLOCK_D, True, HAS_WINDOW, PRECISION,
    )  # fmt: skip
    b_acc = b_acc / tl.where(b_total == 0.0, 1.0, b_total)[:, None]  # 0 in lines without a row
    o_out = (o_line * (tl.num_programs(1) * GROUP) + o_heads)[:, None] * DIM + o_d[None, :]
    tl.store(p_out + o_out, b_acc.to(p_out.dtype.element_ty), mask=m_out)


@triton.jit
def _attend(
    b_acc,
    b_peak,
    b_total,
    b_q,
    b_position,
    begin,
    stop,
    low,
    end,
    p_k,
    p_v,
    p_pages,
    stride_k,
    stride_v,
    scale,
    window,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add the keys begin .. stop, whole blocks, to a softmax under way."""
    o_d = tl.arange(0, BLOCK_D)
    o_n = begin + tl.arange(0, BLOCK_N)
    b_next = tl.load(p_pages + o_n // PAGE, mask=(o_n < end) & (o_n >= low), other=0)
    for n in range(begin, stop, BLOCK_N):
        o_n = n + tl.arange(0, BLOCK_N)
        m_n = o_n < end
        if HAS_WINDOW:
            m_n = m_n & (o_n >= low)
        # Pages are read a step ahead, so that keys and values never wait for their addresses.
        b_page = b_next.to(tl.int64)
        b_next = tl.load(p_pages + (o_n + BLOCK_N) // PAGE, mask=o_n + BLOCK_N < end, other=0)
        o_token = (o_n % PAGE) * DIM
        o_k = (b_page * stride_k + o_token)[:, None] + o_d[None, :]
        o_v = (b_page * stride_v + o_token)[:, None] + o_d[None, :]
        if MASKED:
            m_kv = m_n[:, None] & (o_d < DIM)[None, :]
            b_k = tl.load(p_k + o_k, mask=m_kv, other=0.0)
        elif DIM == BLOCK_D:
            b_k = tl.load(p_k + o_k)
        else:
            b_k = tl.load(p_k + o_k, mask=(o_d < DIM)[None, :], other=0.0)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        if MASKED:
            seen = o_n[None, :] <= b_position[:, None]
            if HAS_WINDOW:
                seen = seen & (o_n[None, :] > b_position[:, None] - window)
            b_s = tl.where(seen, b_s, float("-inf"))
        b_new = tl.maximum(b_peak, tl.max(b_s, 1) * scale)
        b_base = b_new
        if MASKED and HAS_WINDOW:  # a row may have seen nothing yet: -inf - -inf would be NaN
            b_base = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_p = tl.exp2(b_s * scale - b_base[:, None])
        b_fade = tl.exp2(b_peak - b_base)
        b_peak = b_new
        b_total = b_total * b_fade + tl.sum(b_p, 1)
        if MASKED:
            b_v = tl.load(p_v + o_v, mask=m_kv, other=0.0)
        elif DIM == BLOCK_D:
            b_v = tl.load(p_v + o_v)
        else:
            b_v = tl.load(p_v + o_v, mask=(o_d < DIM)[None, :], other=0.0)
        b_acc = b_acc * b_fade[:, None]
        b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc, input_precision=PRECISION)
    return b_acc, b_peak, b_total


__all__ = ["prefill_kernel"]
