# mypy: ignore-errors
# ruff: noqa: RUF005 (tuples are joined by +: kernels know no unpacking)
"""The NF4 product for few rows: weights go from memory to registers, each warp by itself (Gluon).

Legend: a program has T tiles of 16 output features at a time and W warps. The warps share its
columns: in a step each has PAIRS pairs of 64-column blocks. See `packed.py` for the words.
"""

from triton import language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.gluon_names import barrier
from kernels.nf4 import lookup
from kernels.nf4.codebook import GAIN
from kernels.nf4.few_input import in_lane_order, load_norm, load_rows, normalise, store_rows
from kernels.nf4.few_parts import (
    join_parts,
    lanes,
    load_scales,
    load_words,
    product,
    spread_scales,
    sum_layout,
    sum_of_warps,
)

_GAIN = tl.constexpr(GAIN)
_FILL_4, _FILL_8 = tl.constexpr(lookup.fill(128)), tl.constexpr(lookup.fill(256))
_FILL_16 = tl.constexpr(lookup.fill(512))
_WAIT = tl.constexpr("griddepcontrol.wait; mov.u32 $0, 0;")
# Loads before it stay before it: else the assembler moves them to where their results are used.
_LOADS_FIRST = tl.constexpr("bar.warp.sync 0xffffffff; mov.u32 $0, 0;")


@gluon.jit
def _do(assembly: gl.constexpr, unused):
    gl.inline_asm_elementwise(assembly, "=r,r", [unused], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit(do_not_specialize=["rows", "groups"])
def nf4_few(
    p_x,
    p_residual,
    p_norm,
    p_total,
    p_words,
    p_scales,
    p_table,
    p_bias,
    p_y,
    p_partial,
    p_arrived,
    rows,
    features,
    columns,
    padded,
    stride_x,
    blocks,
    groups,
    eps,
    HAS_NORM: gl.constexpr,
    T: gl.constexpr,
    BM: gl.constexpr,
    PAIRS: gl.constexpr,
    STEPS: gl.constexpr,
    BUFFERS: gl.constexpr,
    SPLIT: gl.constexpr,
    W: gl.constexpr,
    HAS_BIAS: gl.constexpr,
):
    """y [rows, features] = x' [rows, columns] W^T + bias, for at most BM rows.

    x' is x or, with HAS_NORM, the norm of x and the residual: their sum goes to p_total, and as
    whole rows are needed, SPLIT is 1. A program prepares its part of the columns of x' once and
    then has every `num_programs / SPLIT`-th group of T tiles. With SPLIT > 1 the last of the
    programs that share an output adds their sums, in order.
    """
    K: gl.constexpr = PAIRS * 128
    TILES: gl.constexpr = (BM + 7) // 8
    part = gl.program_id(0) % SPLIT
    group = gl.program_id(0) // SPLIT
    across = gl.num_programs(0) // SPLIT
    begin = (blocks // 2 * part) // SPLIT
    end = (blocks // 2 * (part + 1)) // SPLIT
    words = load_words(p_words, group * T, begin, end, blocks, PAIRS, T, W)
    scales = load_scales(p_scales, group * T, begin, end, padded, PAIRS, T, W)
    if HAS_NORM:
        norm = load_norm(p_norm, columns, STEPS, BM, K, W)
    _do(_LOADS_FIRST, rows)
    lane = gl.inline_asm_elementwise(
        _FILL_4 if W == 4 else _FILL_8 if W == 8 else _FILL_16,
        "=r,l",
        [p_table.to(gl.int64)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
    _do(_WAIT, rows)  # x and the workspace may still be in use by the kernel before
    xs = load_rows(
        p_x, p_residual, rows, stride_x, begin * 128, end * 128, columns, HAS_NORM, STEPS, BM, K, W
    )
    if HAS_NORM:
        if gl.program_id(0) == 0:
            store_rows(p_total, xs, rows, columns, STEPS, BM, K, W)
        xs = normalise(xs, norm, eps, columns, STEPS)
    x_shared = gl.allocate_shared_memory(
        gl.int32, [BUFFERS, W, K // 2 * BM], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    for i in gl.static_range(STEPS):
        x_shared.index(i).store(in_lane_order(xs[i], BM, K, W))
    barrier()
    sums_shared = gl.allocate_shared_memory(
        gl.float32, [W, T * 128], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    i_sum = gl.arange(0, T * 128, layout=gl.SliceLayout(0, sum_layout(T * 128, W)))
    i_n = i_sum // 128 * 16 + i_sum % 4 // 2 * 8 + i_sum % 128 // 16
    i_m = i_sum % 16 // 4 * 2 + i_sum % 2
    while group < groups:
        sums = ()
        for _ in gl.static_range(TILES):
            sums = sums + (gl.zeros([W, T, 8, 4, 4], gl.float32, lanes(T, W, 4)),)
        for step in range(STEPS):
            is_last = step == STEPS - 1
            next_group = group + (across if is_last else 0)
            first = begin + (0 if is_last else step + 1) * (W * PAIRS)
            limit = end if next_group < groups else 0
            next_words = load_words(p_words, next_group * T, first, limit, blocks, PAIRS, T, W)
            next_scales = load_scales(p_scales, next_group * T, first, limit, padded, PAIRS, T, W)
            _do(_LOADS_FIRST, rows)
            x_step = x_shared.index(step)
            for block in gl.static_range(2 * PAIRS):
                both = scales[block // 2]
                scale = spread_scales(both & -65536 if block % 2 else both << 16, T, W)
                parts = product(words[block], lane, x_step, block, BM, T, W)
                if TILES == 1:
                    sums = (sums[0] + parts[0] * scale,)
                else:
                    sums = (sums[0] + parts[0] * scale, sums[1] + parts[1] * scale)
            words = next_words
            scales = next_scales
        for tile in gl.static_range(TILES):
            total = sum_of_warps(sums[tile], sums_shared, T, W)
            is_whole = True
            if SPLIT > 1:
                place = group * TILES + tile
                is_whole, total = join_parts(total, p_partial, p_arrived, place, part, i_sum, SPLIT)
            if is_whole:
                o_n, o_m = group * (16 * T) + i_n, tile * 8 + i_m
                y = total * (1.0 / _GAIN)
                if HAS_BIAS:
                    y += gl.load(p_bias + o_n, mask=o_n < features, other=0.0).to(gl.float32)
                p_out = p_y + o_m.to(gl.int64) * features + o_n
                gl.store(p_out, y.to(p_y.dtype.element_ty), mask=(o_n < features) & (o_m < rows))
        group += across
