# mypy: ignore-errors
"""Triton: chunks of query rows over paged keys and values, causal, with a cached prefix.

    program (tile, KV head, split)
    tile = ROWS query rows of one sequence x GROUP heads of one KV head, packed in BLOCK_M lines
    split = an equal share of the keys that a tile sees, of MIN_SPLIT at least
    tiles of sequence b, from `first` on: query_offsets[b] // ROWS + b and on, less the same of
    `first`; some at the ends have no rows

        begin          free_begin           free_end          end
    keys  | window's edge  | seen by all rows   | causal edge   |
            masked           no mask              masked

Tiles are taken from the last: in each sequence those with the most keys come first. The last split
of a tile to finish merges the partial results of all, in order, as in `decode_kernel`.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["stride_table", "window", "first", "sequences", "splits"])
def prefill_kernel(
    p_q,  # [T, Hq, D]
    p_k,  # [pages, Hkv, PAGE, D], pages stride_page apart
    p_v,
    p_out,  # [T, Hq, D], contiguous
    p_part,  # float32 [tiles, Hkv, splits, BLOCK_M, BLOCK_D], contiguous
    p_lse,  # float32 [tiles, Hkv, splits, BLOCK_M]: base-2 logarithms of the partial sums
    p_count,  # int32 [tiles, Hkv], zero before and after
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
    first,  # sequences before are left to the decode kernel
    sequences,  # from there
    splits,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_B: tl.constexpr,
    MIN_SPLIT: tl.constexpr,  # a multiple of BLOCK_N
    HAS_SPLITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    ROWS: tl.constexpr = BLOCK_M // GROUP
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    o_b = tl.arange(0, BLOCK_B)
    p_offsets += first
    begin_tile = tl.load(p_offsets) // ROWS
    b_first = tl.load(p_offsets + o_b, mask=o_b < sequences, other=0) // ROWS + o_b - begin_tile
    b = tl.sum(((o_b < sequences) & (b_first <= tile)).to(tl.int32), 0) - 1
    start = tl.load(p_offsets + b)
    rows = tl.load(p_offsets + b + 1) - start
    row = (tile + begin_tile - start // ROWS - b) * ROWS
    if row >= rows:
        return
    b += first
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
    used = 1
    if HAS_SPLITS:
        split = tl.program_id(2)
        share = tl.cdiv(tl.cdiv(end - begin, splits), BLOCK_N) * BLOCK_N
        share = tl.maximum(share, MIN_SPLIT)
        used = tl.cdiv(end - begin, share)
        if split >= used:
            return
        begin += split * share
        end = tl.minimum(begin + share, end)
        free_begin = tl.minimum(tl.maximum(free_begin, begin), begin + share)
        free_end = tl.minimum(tl.maximum(free_end, free_begin), begin + share)

    p_pages = p_table + b.to(tl.int64) * stride_table
    o_k = head * (PAGE * DIM)
    b_peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    b_total = tl.zeros([BLOCK_M], tl.float32)
    b_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if HAS_WINDOW:
        b_acc, b_peak, b_total = _attend(
            b_acc, b_peak, b_total, b_q, b_position, begin, tl.minimum(free_begin, end), low, end,
            p_k + o_k, p_v + o_k, p_pages, stride_k, stride_v, scale, window,
            DIM, PAGE, BLOCK_N, BLOCK_D, True, True, True,
        )  # fmt: skip
    b_acc, b_peak, b_total = _attend(
        b_acc, b_peak, b_total, b_q, b_position, free_begin, free_end, low, end,
        p_k + o_k, p_v + o_k, p_pages, stride_k, stride_v, scale, window,
        DIM, PAGE, BLOCK_N, BLOCK_D, False, HAS_WINDOW, False,
    )  # fmt: skip
    b_acc, b_peak, b_total = _attend(
        b_acc, b_peak, b_total, b_q, b_position, free_end, end, low, end,
        p_k + o_k, p_v + o_k, p_pages, stride_k, stride_v, scale, window,
        DIM, PAGE, BLOCK_N, BLOCK_D, True, HAS_WINDOW, HAS_WINDOW or HAS_SPLITS,
    )  # fmt: skip
    b_acc = b_acc / tl.where(b_total == 0.0, 1.0, b_total)[:, None]  # 0 in lines without a row
    o_out = (o_line * (tl.num_programs(1) * GROUP) + o_heads)[:, None] * DIM + o_d[None, :]
    if HAS_SPLITS:  # noqa: SIM102 - settled when compiling, unlike the next one
        if used > 1:
            pair = tile * tl.num_programs(1) + head
            part = pair.to(tl.int64) * splits
            o_part = o_m[:, None] * BLOCK_D + o_d[None, :]
            p_mine = p_part + (part + split) * (BLOCK_M * BLOCK_D) + o_part
            tl.store(p_mine, b_acc)
            b_lse = tl.where(b_total == 0.0, float("-inf"), b_peak + tl.log2(b_total))
            tl.store(p_lse + (part + split) * BLOCK_M + o_m, b_lse)
            tl.debug_barrier()  # every thread's part is written before one of them counts
            done = tl.atomic_add(p_count + pair, 1, sem="acq_rel", scope="gpu")
            if done == used - 1:
                b_merged = _merge(
                    p_part + part * (BLOCK_M * BLOCK_D) + o_part, p_lse + part * BLOCK_M + o_m,
                    used, BLOCK_M, BLOCK_D,
                )  # fmt: skip
                tl.store(p_out + o_out, b_merged.to(p_out.dtype.element_ty), mask=m_out)
                tl.store(p_count + pair, 0)
            return
    tl.store(p_out + o_out, b_acc.to(p_out.dtype.element_ty), mask=m_out)


@triton.jit
def _merge(p_part, p_lse, used, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """Softmax-weighted mean of a tile's partial results, the first `used`."""
    b_peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    b_total = tl.zeros([BLOCK_M], tl.float32)
    b_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for s in tl.range(0, used, num_stages=3):  # several parts are on their way at once
        # Read from L2: the parts were written by other multiprocessors.
        b_lse = tl.load(p_lse + s * BLOCK_M, cache_modifier=".cg")
        b_part = tl.load(p_part + s * (BLOCK_M * BLOCK_D), cache_modifier=".cg")
        b_new = tl.maximum(b_peak, b_lse)
        b_base = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_weight = tl.exp2(b_lse - b_base)
        b_fade = tl.exp2(b_peak - b_base)
        b_peak = b_new
        b_total = b_total * b_fade + b_weight
        b_acc = b_acc * b_fade[:, None] + b_part * b_weight[:, None]
    return b_acc / tl.where(b_total == 0.0, 1.0, b_total)[:, None]


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
    MAY_BE_EMPTY: tl.constexpr,
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
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
        if MASKED:
            seen = o_n[None, :] <= b_position[:, None]
            if HAS_WINDOW:
                seen = seen & (o_n[None, :] > b_position[:, None] - window)
            b_s = tl.where(seen, b_s, float("-inf"))
        b_new = tl.maximum(b_peak, tl.max(b_s, 1) * scale)
        b_base = b_new
        if MASKED and MAY_BE_EMPTY:  # a row may have seen nothing yet: -inf - -inf would be NaN
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
        b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc, input_precision="ieee")
    return b_acc, b_peak, b_total


__all__ = ["prefill_kernel"]
