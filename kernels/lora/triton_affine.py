# mypy: ignore-errors
"""y = (y - c) * gain + c + own of each row's own adapter.

Names: b_ blocks, p_ pointers, o_ offsets, m_ masks. Byte offsets and row starts are int64.
"""

import triton
import triton.language as tl

from kernels.lora.triton_rows import choose, find_rows

_VARYING = [
    *("num_segments", "row_tiles", "o_head0", "o_head1", "o_head2"),
    *("start0", "start1", "start2", "width0", "width1", "width2"),
]


@triton.jit(do_not_specialize=_VARYING)
def affine_kernel(
    p_y,
    p_bias,
    p_arena,
    p_descriptors,
    p_offsets,
    p_numbers,
    num_segments,
    row_tiles,
    stride_y,
    o_head0,
    o_head1,
    o_head2,
    start0,
    start1,
    start2,
    width0,
    width1,
    width2,
    SITES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_SEGMENTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program a (block of columns, tile of rows, site)."""
    number, first, stop = find_rows(
        tl.program_id(1), p_offsets, p_numbers, num_segments, row_tiles, BLOCK_ROWS, BLOCK_SEGMENTS
    )
    site = tl.program_id(2)
    width = choose(site, width0, width1, width2, SITES)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    if number >= 0:
        p_record = p_descriptors + number
        head = tl.load(p_record + choose(site, o_head0, o_head1, o_head2, SITES))
        r = head & 0xFFFF
        # A site without a rank has no offsets: its head is read in their place, and not used.
        p_words = p_record + tl.where(r > 0, (head >> 16) + 2 * r, 0)
        gain = tl.where(r > 0, tl.load(p_words), -1)
        own = tl.where(r > 0, tl.load(p_words + 1), -1)
        if (gain >= 0) | (own >= 0):
            rows = first + tl.arange(0, BLOCK_ROWS)
            column = choose(site, start0, start1, start2, SITES) + n
            m_y = (rows < stop)[:, None] & (n < width)[None, :]
            p_out = p_y + rows.to(tl.int64)[:, None] * stride_y + column[None, :]
            b_y = tl.load(p_out, mask=m_y, other=0.0).to(tl.float32)
            if gain >= 0:
                b_base = tl.zeros((BLOCK_N,), tl.float32)
                if HAS_BIAS:
                    b_base += tl.load(p_bias + column, mask=n < width, other=0.0).to(tl.float32)
                b_gain = _load_row(p_arena, gain, n, n < width)
                b_y = (b_y - b_base[None, :]) * b_gain[None, :] + b_base[None, :]
            if own >= 0:
                b_y += _load_row(p_arena, own, n, n < width)[None, :]
            tl.store(p_out, b_y.to(p_y.dtype.element_ty), mask=m_y)


@triton.jit
def _load_row(p_arena, offset, n, m_n):
    """Return elements n of the float32 row at a byte offset."""
    return tl.load((p_arena + offset).to(tl.pointer_type(tl.float32)) + n, mask=m_n, other=0.0)
