# mypy: ignore-errors
"""Gluon: what a group of four warps does with the blocks that `hopper_kernel` brings."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@gluon.jit
def span_of(item, where, ROWS: gl.constexpr, WARPS: gl.constexpr, sizes: gl.constexpr):
    """Return (head, sequence, first line's row of q, row, rows, context, low, begin, blocks)."""
    p_offsets, p_contexts, window, sequences, tiles, heads, _ = where
    BLOCK_N: gl.constexpr = sizes[3]
    BLOCK_B: gl.constexpr = sizes[4]
    HAS_WINDOW: gl.constexpr = sizes[6]
    head = item % heads
    tile = tiles - 1 - item // heads
    layout: gl.constexpr = gl.BlockedLayout([BLOCK_B // 32], [32], [WARPS], [0])
    o_b = gl.arange(0, BLOCK_B, layout=layout)
    m_b = o_b < sequences
    begin_tile = gl.load(p_offsets) // ROWS
    b_first = gl.load(p_offsets + o_b, mask=m_b, other=0) // ROWS + o_b - begin_tile
    b = gl.sum((m_b & (b_first <= tile)).to(gl.int32), 0) - 1
    start = gl.load(p_offsets + b)
    rows = gl.load(p_offsets + b + 1) - start
    context = gl.load(p_contexts + b)
    row = (tile + begin_tile - start // ROWS - b) * ROWS
    earliest = context - rows + row
    end = gl.minimum(earliest + ROWS, context)
    low = 0
    begin = 0
    if HAS_WINDOW:
        low = gl.maximum(earliest - window + 1, 0)
        begin = low // BLOCK_N * BLOCK_N
    blocks = gl.where(row < rows, gl.cdiv(end - begin, BLOCK_N), 0)
    return head, b, start, row, rows, context, low, begin, blocks


@gluon.jit
def attend(HALF: gl.constexpr, where, heads_of, blocks, sizes: gl.constexpr):
    """A block's softmax runs beside the product of the weights and values of the block before."""
    GROUP: gl.constexpr = sizes[0]
    PARTS: gl.constexpr = sizes[1] // 64
    BLOCK_N: gl.constexpr = sizes[3]
    STAGES: gl.constexpr = sizes[5]
    ROWS: gl.constexpr = 64 // GROUP
    p_q, p_out, stride_row, stride_head, scale = heads_of
    q_parts, k_parts, v_parts, k_full, v_full, k_free, v_free, clean = blocks
    window = where[2]
    heads = where[5]
    each = where[6]
    dtype: gl.constexpr = p_q.dtype.element_ty
    plain: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    of_s: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    of_o: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    of_p: gl.constexpr = gl.DotOperandLayout(0, of_o, 2)
    o_m = gl.arange(0, 64, layout=gl.SliceLayout(1, plain))
    o_d = gl.arange(0, 64, layout=gl.SliceLayout(0, plain))
    o_line = gl.arange(0, 64, layout=gl.SliceLayout(1, of_s))
    step = 0
    cleaned = 0
    first = gl.program_id(0) * each
    for item in range(first, gl.minimum(first + each, where[4] * heads)):
        head, _b, start, row, rows, context, _low, begin, count = span_of(
            item, where, 2 * ROWS, 4, sizes
        )
        if count > 0:
            row += HALF * ROWS
            o_row = row + o_m // GROUP
            o_head = head * GROUP + o_m % GROUP
            m_m = ((o_m < ROWS * GROUP) & (o_row < rows))[:, None]
            o_t = (start + o_row).to(gl.int64)
            o_q = (o_t * stride_row + o_head * stride_head)[:, None] + o_d[None]
            for part in gl.static_range(PARTS):
                b_q = gl.load(p_q + o_q + part * 64, mask=m_m, other=0.0)
                q_parts.index(HALF * PARTS + part).store(b_q)
            fence_async_shared()
            earliest = context - rows + row
            b_position = earliest + o_line // GROUP
            b_peak = gl.full([64], float("-inf"), gl.float32, layout=gl.SliceLayout(1, of_s))
            b_total = gl.zeros([64], gl.float32, layout=gl.SliceLayout(1, of_s))
            b_o0 = gl.zeros([64, 64], gl.float32, layout=of_o)
            b_o1 = b_o0
            _await(k_full, step, True, STAGES)
            b_s = _scores(q_parts, k_parts, HALF, step % STAGES, PARTS, BLOCK_N)
            b_s = warpgroup_mma_wait(0, deps=(b_s,))
            mbarrier.arrive(k_free.index(step % STAGES), count=1)
            b_w, b_fade, b_peak, b_total = _soften(
                b_s, b_peak, b_total, b_position, begin, earliest, window, scale, sizes
            )
            _await(k_full, step + 1, count > 1, STAGES)
            b_p = gl.convert_layout(b_w.to(dtype), of_p)
            for i in range(1, count):
                old = step % STAGES
                stage = (step + 1) % STAGES
                b_s = _scores(q_parts, k_parts, HALF, stage, PARTS, BLOCK_N)
                _await(v_full, step, True, STAGES)
                b_o0, b_o1 = _weigh(b_p, v_parts, old, b_o0, b_o1, PARTS)
                b_s = warpgroup_mma_wait(PARTS, deps=(b_s,))
                mbarrier.arrive(k_free.index(stage), count=1)
                b_w, b_fade, b_peak, b_total = _soften(
                    b_s, b_peak, b_total, b_position, begin + i * BLOCK_N, earliest, window, scale,
                    sizes,
                )  # fmt: skip
                step += 1
                # Here, as a branch keeps the softmax before the end of the product beside it.
                _await(k_full, step + 1, i + 1 < count, STAGES)
                b_o0, b_o1, b_w = warpgroup_mma_wait(0, deps=(b_o0, b_o1, b_w))
                mbarrier.arrive(v_free.index(old), count=1)
                b_o0 = b_o0 * b_fade
                if PARTS == 2:
                    b_o1 = b_o1 * b_fade
                b_p = gl.convert_layout(b_w.to(dtype), of_p)
            stage = step % STAGES
            _await(v_full, step, True, STAGES)
            behind = context - begin - (count - 1) * BLOCK_N
            if behind < BLOCK_N:
                for part in gl.static_range(PARTS):
                    _clear_behind(v_parts.index(stage * PARTS + part), behind, HALF, BLOCK_N)
                fence_async_shared()
                mbarrier.arrive(clean, count=1)
                mbarrier.wait(clean, cleaned & 1)
                cleaned += 1
            b_o0, b_o1 = _weigh(b_p, v_parts, stage, b_o0, b_o1, PARTS)
            b_o0, b_o1 = warpgroup_mma_wait(0, deps=(b_o0, b_o1))
            mbarrier.arrive(v_free.index(stage), count=1)
            step += 1
            b_factor = (1.0 / gl.convert_layout(b_total, gl.SliceLayout(1, of_o)))[:, None]
            p_lines = p_out + ((o_t * (heads * GROUP) + o_head) * (PARTS * 64))[:, None] + o_d[None]
            gl.store(p_lines, gl.convert_layout((b_o0 * b_factor).to(dtype), plain), mask=m_m)
            if PARTS == 2:
                b_out = gl.convert_layout((b_o1 * b_factor).to(dtype), plain)
                gl.store(p_lines + 64, b_out, mask=m_m)


@gluon.jit
def _await(full, step, wanted, STAGES: gl.constexpr):
    """Wait for the block of a step, if it is wanted."""
    mbarrier.wait(full.index(step % STAGES), (step // STAGES) & 1, pred=wanted)


@gluon.jit
def _scores(
    q_parts, k_parts, HALF: gl.constexpr, stage, PARTS: gl.constexpr, BLOCK_N: gl.constexpr
):
    """Begin Q K^T of a block: [64, BLOCK_N]."""
    of_s: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    b_s = gl.zeros([64, BLOCK_N], gl.float32, layout=of_s)
    for part in gl.static_range(PARTS):
        b_k = k_parts.index(stage * PARTS + part).permute((1, 0))
        b_q = q_parts.index(HALF * PARTS + part)
        b_s = warpgroup_mma(b_q, b_k, b_s, use_acc=part > 0, is_async=True)
    return b_s


@gluon.jit
def _weigh(b_p, v_parts, stage, b_o0, b_o1, PARTS: gl.constexpr):
    """Begin to add a block's P V to both parts of the output: [64, 64]."""
    b_o0 = warpgroup_mma(b_p, v_parts.index(stage * PARTS), b_o0, is_async=True)
    if PARTS == 2:
        b_o1 = warpgroup_mma(b_p, v_parts.index(stage * PARTS + 1), b_o1, is_async=True)
    return b_o0, b_o1


@gluon.jit
def _soften(b_s, b_peak, b_total, b_position, n, earliest, window, scale, sizes: gl.constexpr):
    """Return (weights of the keys from n on, fade of earlier sums, new peak, new total)."""
    BLOCK_N: gl.constexpr = sizes[3]
    HAS_WINDOW: gl.constexpr = sizes[6]
    of_s: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    of_o: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    masked = n + BLOCK_N > earliest + 1
    if HAS_WINDOW:
        masked = masked | (n <= earliest + 64 // sizes[0] - 1 - window)
    if masked:
        o_n = (n + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, of_s)))[None, :]
        m_s = o_n <= b_position[:, None]
        if HAS_WINDOW:
            m_s = m_s & (o_n > b_position[:, None] - window)
        b_s = gl.where(m_s, b_s, float("-inf"))
    b_new = gl.maximum(b_peak, gl.max(b_s, 1) * scale)
    b_base = b_new
    if HAS_WINDOW:  # a row may have seen nothing yet: -inf - -inf would be NaN
        b_base = gl.where(b_new == float("-inf"), 0.0, b_new)
    b_w = gl.exp2(b_s * scale - b_base[:, None])
    b_fade = gl.exp2(b_peak - b_base)
    b_total = b_total * b_fade + gl.sum(b_w, 1)
    return b_w, gl.convert_layout(b_fade, gl.SliceLayout(1, of_o))[:, None], b_new, b_total


@gluon.jit
def _clear_behind(b_v, keys, HALF: gl.constexpr, BLOCK_N: gl.constexpr):
    """Set the rows from `keys` on to zero in a group's half of them."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    ROWS: gl.constexpr = BLOCK_N // 2
    o_n = HALF * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    rows = b_v.slice(HALF * ROWS, ROWS)
    rows.store(gl.where((o_n < keys)[:, None], rows.load(layout), 0.0))


__all__ = ["attend", "span_of"]
